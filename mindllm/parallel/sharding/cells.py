"""One function for each class of cell: from a cell at a path to the layouts of its operators.

Tensor parallelism splits heads, the feed-forward width and the vocabulary (Shoeybi et al., 2019); with sequence
parallelism the tokens between those parts are split over the same devices (Korthikanti et al., 2022). Context parallelism splits
every sequence, and attention communicates the parts it needs (``attention_heads.py``). Functions read the built
cell, so that the table has an entry for exactly the operators of the model.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspore import nn

from mindllm.architecture.parts import ACTIVATION_OPERATORS
from mindllm.config.parallel import ParallelConfig
from mindllm.models import CausalLM
from mindllm.models.attention.attention import Attention
from mindllm.models.attention.latent_attention import LatentAttention
from mindllm.models.attention.rotary import RotaryEmbedding
from mindllm.models.causal_lm import Head, UnitRows
from mindllm.models.decoder import AttentionTables, Decoder, Lookup
from mindllm.models.decoder_layer import DecoderLayer
from mindllm.models.experts.experts import Experts
from mindllm.models.feed_forward import FeedForward
from mindllm.models.fine_grain_interleave import FineGrainInterleavedLayer
from mindllm.models.linear import Linear
from mindllm.models.loss import SequenceChunks
from mindllm.models.mtp import MTPLayer
from mindllm.models.norm import LayerNorm, RMSNorm
from mindllm.models.pieces import PieceTables
from mindllm.parallel.layout import Dimension, Layout
from mindllm.parallel.sharding.adapters import (
    adapt_split_input,
    adapt_split_output,
    bottleneck,
    codes_split_by_columns,
    codes_split_by_rows,
)
from mindllm.parallel.sharding.attention_cores import ATTENTION_CORES, SCALAR, soft_cap
from mindllm.parallel.sharding.attention_heads import BATCH, HEADS, SEQUENCE, SHARED_HEADS, SplitHeads, split_heads
from mindllm.parallel.sharding.dropout import dropout, embedding_noise
from mindllm.parallel.sharding.experts import routed_experts
from mindllm.parallel.sharding.table import Table, on

TOKENS: Dimension = (BATCH, SEQUENCE)
SPREAD: Dimension = (BATCH, SEQUENCE, "tp")
COLUMNS: Layout = (BATCH, SEQUENCE)
INNER: Layout = (TOKENS, "tp")  # [tokens, heads · head_dim] and [tokens, feed-forward width]


def sharding_table(lm: CausalLM, parallel: ParallelConfig) -> Table:
    """Shardings of all operators of ``lm`` by path."""
    rows = SPREAD if parallel.use_seq_parallel else TOKENS  # of hidden states between attention and feed-forward
    unsplit_vocabulary = not has_split_vocabulary(lm, parallel)
    return {
        **_decoder("model", lm.model, rows, parallel.vocab_emb_dp, split_heads(parallel)),
        **_chunks("losses", lm.losses),
        **_head_and_loss(lm, unsplit_vocabulary, parallel.model_parallel > 1),
        **(_token_shifts(lm, SPREAD if unsplit_vocabulary else TOKENS) if lm.has_mtp else {}),
    }


def has_split_vocabulary(lm: CausalLM, parallel: ParallelConfig) -> bool:
    """Return True if tensor-parallel ranks have parts of the logits. A tied head has the layout of the embedding."""
    return not (lm.tied and parallel.vocab_emb_dp)


def _decoder(at: str, cell: Decoder, rows: Dimension, unsplit_table: bool, heads: SplitHeads) -> Table:
    table = _lookup(f"{at}.tok_embeddings", cell.tok_embeddings, rows, unsplit_table)
    if cell.predictions:
        table |= _lookup(f"{at}.lookup_ahead", cell.lookup_ahead, rows, unsplit_table)
    if cell.adds_noise:
        table |= embedding_noise(f"{at}.embedding_noise", rows)
    if cell.learns_positions:
        table |= _position_embedding(f"{at}.position_embeddings", rows, cell.document_masks)
    if cell.norms_embeddings:
        table |= _norm(f"{at}.embedding_norm", cell.embedding_norm, (rows, None))
    if cell.drops_embeddings:
        table |= dropout(f"{at}.embedding_dropout", rows)
    if cell.document_masks:
        for number, tables in enumerate(cell.tables):
            table |= _row_tables(f"{at}.tables.{number}", tables, heads.rows)
    for number, tables in enumerate(cell.tables):
        for context, context_tables in enumerate(tables.contexts):
            if context_tables.in_pieces:
                table |= _piece_tables(f"{at}.tables.{number}.contexts.{context}.piece", context_tables.piece)
    if any(cell.drops):
        table |= {f"{at}.dropout_keys.{number}.mul": on(COLUMNS, SCALAR) for number in range(len(cell.layers))}
    for number, layer in enumerate(cell.layers):
        table |= _layer(f"{at}.layers.{number}", layer, rows, heads)
    return table | _norm(f"{at}.norm_out", cell.norm_out, (rows, None))


def _lookup(at: str, cell: Lookup, rows: Dimension, unsplit_table: bool) -> Table:
    """Weight ``[vocab, hidden]`` and ids ``[tokens]``. A split table looks up its part and adds the parts."""
    split = on(("tp", None), (TOKENS,), out=(rows, None))
    scaled = {f"{at}.mul": on((rows, None), SCALAR)} if cell.scales else {}
    return {f"{at}.gather": on((None, None), (rows,)) if unsplit_table else split, **scaled}


def _row_tables(at: str, cell: AttentionTables, rows: Dimension) -> Table:
    """Masks ``[batch, 1, seq, seq]`` from where documents begin, for the ``rows`` of queries, and rows of tables at the positions
    of tokens.
    """
    keys: Layout = (None, None, None, None)
    queries: Layout = (None, None, rows, None)  # [1, 1, seq, 1], and their mask of every row
    row_layout: Layout = (BATCH, None, rows, None)
    table = {f"{at}.gather": on((None, None), (TOKENS,))}
    for number, context in enumerate(cell.contexts):
        if not context.masks_rows:
            continue
        mask = f"{at}.contexts.{number}.document_mask"
        table |= {
            f"{mask}.behind": on(keys, queries),
            f"{mask}.before": on(keys, row_layout),
            f"{mask}.either": on(row_layout, queries),
            f"{mask}.far_below": on(row_layout, SCALAR),
        }
        if context.document_mask.windowed:
            table[f"{mask}.later"] = on(row_layout, queries)
    return table


def _piece_tables(at: str, cell: PieceTables) -> Table:
    """Every device has the rows of a piece whole."""
    places: Layout = (None, None, None, None)
    table = {
        f"{at}.first_place": on(SCALAR, SCALAR),
        f"{at}.places": on((None,), SCALAR),
        f"{at}.own": on(places, SCALAR),
    }
    rows = ("cos", "sin", "mask") if cell.cuts_mask else ("cos", "sin")
    return table | {f"{at}.{name}": on((None, None), (None,)) for name in rows}


def _earlier_pieces(at: str) -> Table:
    """Return layouts of the keys of all pieces so far. Each device has its rows and heads; places of a piece are equal."""
    return {
        f"{at}.tile": on(HEADS),
        f"{at}.at_own_places": on(HEADS, (None, None, None, None)),
        f"{at}.join": on(HEADS, HEADS),
        f"{at}.less": on(HEADS, HEADS),
        f"{at}.is_any": on(HEADS, SCALAR),
        f"{at}.goes_on": on(SCALAR, SCALAR),
        f"{at}.keeps": on(HEADS, SCALAR),
        f"{at}.select": on(HEADS, HEADS, HEADS),
        f"{at}.assign": on(HEADS, HEADS),
    }


def _position_embedding(at: str, rows: Dimension, by_row: bool) -> Table:
    """Every device looks up all positions, ``[seq, hidden]``, and adds them to its part of ``[batch, seq, hidden]``; or those
    ``by_row``, which come with the batch.
    """
    sequence: Dimension = (SEQUENCE, "tp") if rows == SPREAD else SEQUENCE
    if by_row:
        part: Layout = (BATCH, sequence, None)
        return {f"{at}.gather": on((None, None), (TOKENS,)), f"{at}.add": on(part, part)}
    return {
        f"{at}.gather": on((None, None), (None,)),
        f"{at}.add": on((BATCH, sequence, None), (sequence, None)),
    }


def _layer(at: str, cell: DecoderLayer, rows: Dimension, heads: SplitHeads) -> Table:
    hidden: Layout = (rows, None)
    table = {
        **_norm(f"{at}.attention_norm", cell.attention_norm, hidden),
        **ATTENTIONS[type(cell.attention)](f"{at}.attention", cell.attention, rows, heads),
        f"{at}.attention_add": on(hidden, hidden),
        **_norm(f"{at}.ffn_norm", cell.ffn_norm, hidden),
        **FEED_FORWARDS[type(cell.feed_forward)](f"{at}.feed_forward", cell.feed_forward, rows),
        f"{at}.ffn_add": on(hidden, hidden),
    }
    if cell.adds_to_loss:
        table[f"{at}.add_to_loss"] = on((BATCH,), (BATCH,))
    if cell.adapts_attention:
        table |= bottleneck(f"{at}.attention_adapter", rows)
    if cell.adapts_feed_forward:
        table |= bottleneck(f"{at}.feed_forward_adapter", rows)
    if cell.drops:
        table |= dropout(f"{at}.attention_dropout", rows)
        table |= dropout(f"{at}.ffn_dropout", rows)
    if cell.norm_output:
        table |= _norm(f"{at}.attention_post_norm", cell.attention_post_norm, hidden)
        table |= _norm(f"{at}.ffn_post_norm", cell.ffn_post_norm, hidden)
    if isinstance(cell, FineGrainInterleavedLayer):
        table |= _row_parts(at, cell, hidden)
    return table | (_around_prediction(at, cell, hidden) if isinstance(cell, MTPLayer) else {})


def _row_parts(at: str, cell: FineGrainInterleavedLayer, hidden: Layout) -> Table:
    """Return the layouts of cuts and joins, which every device does with the rows that it has.

    At both ends of the model rows are whole on the tensor-parallel ranks, so that they are in the order of the sequence. Between
    stages they stay split where the layers are (``hidden``): a join and the next cut are inverse on every device.
    """
    parts = len(cell.behind)
    all_rows: Layout = (TOKENS, None)
    table = {f"{at}.behind.{index}.slice": on(INNER) for index in range(parts)}
    if cell.cuts:
        table |= {f"{at}.beside.{index}.slice": on(all_rows if cell.first else hidden) for index in range(parts)}
    if not cell.first:
        table |= {f"{at}.{name}": on(*[INNER] * parts) for name in ("join_query", "join_key", "join_value")}
    return table | ({f"{at}.join": on(*[all_rows if cell.last else hidden] * parts)} if cell.joins else {})


def _around_prediction(at: str, cell: MTPLayer, hidden: Layout) -> Table:
    """Return layouts without communication: every device multiplies its rows by the whole projection ``[hidden, 2 · hidden]``."""
    norms = ("enorm", "hnorm", "final_norm")
    table = {
        path: entry for name in norms for path, entry in _norm(f"{at}.{name}", getattr(cell, name), hidden).items()
    }
    return {**table, f"{at}.join": on(hidden, hidden), f"{at}.eh_proj.matmul": on(hidden, (None, None))}


def _norm(at: str, cell: nn.Cell, x: Layout) -> Table:
    """Something of layout ``x``, whose last dimension is whole, and weight (and bias) of that dimension."""
    channels: Layout = (None,)
    if isinstance(cell, LayerNorm):
        return {f"{at}.norm": on(x, channels, channels)}
    if not isinstance(cell, RMSNorm):
        raise TypeError(f"no sharding is known for a norm of class {type(cell).__name__}")
    table = {f"{at}.add_one": on(channels, SCALAR)} if cell.plus_one else {}
    if cell.fused:
        return {**table, f"{at}.norm": on(x, channels)}
    return {
        **table,
        f"{at}.square": on(x),
        f"{at}.mean": on(x),
        f"{at}.add": on(x, SCALAR),
        f"{at}.rsqrt": on(x),
        f"{at}.mul": on(x, x),
        f"{at}.norm": on(x, channels),
    }


def _attention(at: str, cell: Attention, rows: Dimension, heads: SplitHeads) -> Table:
    """Query, key and value are split by heads, the output projection sums over heads."""
    table: Table = {}
    for name in ("wq", "wk", "wv"):
        table |= _split_output(f"{at}.{name}", getattr(cell, name))
    table[f"{at}.transpose"] = on(SHARED_HEADS)
    if cell.norms_heads:
        table |= _norm(f"{at}.query_norm", cell.query_norm, HEADS) | _norm(f"{at}.key_norm", cell.key_norm, HEADS)
    if cell.rotates:
        table |= _rotary(f"{at}.rotary", cell.rotary)
    table |= ATTENTION_CORES[type(cell.attention)](f"{at}.attention", cell.attention, heads)
    table[f"{at}.merge_transpose"] = on(HEADS)
    if cell.in_pieces:
        table |= _earlier_pieces(f"{at}.key_cache") | _earlier_pieces(f"{at}.value_cache")
    return table | _split_input(f"{at}.wo", cell.wo, rows)


def _latent_attention(at: str, cell: LatentAttention, rows: Dimension, heads: SplitHeads) -> Table:
    """Return layouts of latent attention. Narrow tensors are equal on tensor-parallel ranks; heads are split."""
    unsplit: Layout = (TOKENS, None)
    shared_by_heads: Layout = (BATCH, None, SEQUENCE, None)  # [batch, 1, seq, channels]
    down = ("wq_down",) if cell.compresses_queries else ()
    query_projections = ("wq_up_plain", "wq_up_rotary") if cell.compresses_queries else ("wq_plain", "wq_rotary")
    table: Table = {}
    for name in (*down, "wkv_down", "wk_rotary"):
        table |= _split_output(f"{at}.{name}", getattr(cell, name), None)
    for name in (*query_projections, "wk_plain", "wv"):
        table |= _split_output(f"{at}.{name}", getattr(cell, name))
    if cell.compresses_queries:
        table |= _norm(f"{at}.query_latent_norm", cell.query_latent_norm, unsplit)
    table |= _norm(f"{at}.key_value_latent_norm", cell.key_value_latent_norm, unsplit)
    table[f"{at}.transpose"] = on(SHARED_HEADS)
    table |= _rotary(f"{at}.query_rotary", cell.query_rotary)
    table |= _rotary(f"{at}.key_rotary", cell.key_rotary, shared_by_heads)
    table[f"{at}.to_all_heads"] = on(shared_by_heads, (None, "tp", None, None))
    table |= {f"{at}.{name}": on(HEADS, HEADS) for name in ("join_query", "join_key")}
    if cell.pads_values:
        padded = SHARED_HEADS if cell.pads_tokens else HEADS
        table |= {
            f"{at}.padding.first": on(padded),
            f"{at}.padding.concat": on(padded, padded),
            f"{at}.cut": on(padded),
        }
        table[f"{at}.padding.spread"] = on(padded, (None, None, None, None))
    table |= ATTENTION_CORES[type(cell.attention)](f"{at}.attention", cell.attention, heads)
    table[f"{at}.merge_transpose"] = on(HEADS)
    return table | _split_input(f"{at}.wo", cell.wo, rows)


ATTENTIONS: dict[type[nn.Cell], Callable[..., Table]] = {Attention: _attention, LatentAttention: _latent_attention}


def _split_output(at: str, cell: nn.Cell, rows: Dimension = "tp") -> Table:
    """Return layouts of a projection ``[tokens, in] -> [tokens, out]`` with its weight split by ``rows`` (None: not split)."""
    linear = _linear(at, cell)
    product: Layout = (TOKENS, rows)
    table = {f"{at}.matmul": on((TOKENS, None), (rows, None))}
    if linear.has_bias:
        table[f"{at}.bias_add"] = on(product, (rows,))
    if linear.has_activation:
        table |= {
            f"{at}.activation.{name}": on(product)
            for name in ACTIVATION_OPERATORS.values()
            if hasattr(linear.activation, name)
        }
    if linear.is_quantized:
        table |= codes_split_by_rows(f"{at}.held", linear.held, rows)
    return table | (adapt_split_output(f"{at}.adapter", linear.adapter, rows) if linear.has_adapter else {})


def _split_input(at: str, cell: nn.Cell, rows: Dimension) -> Table:
    """Return layouts of a projection with split input and a weight split by columns: products are added over ``tp``."""
    table = {f"{at}.matmul": on(INNER, (None, "tp"), out=(rows, None))}
    linear = _linear(at, cell)
    if linear.has_bias:
        table[f"{at}.bias_add"] = on((rows, None), (None,))  # once, after the sum
    if linear.is_quantized:
        table |= codes_split_by_columns(f"{at}.held", linear.held)
    return table | (adapt_split_input(f"{at}.adapter", linear.adapter, rows) if linear.has_adapter else {})


def _linear(at: str, cell: nn.Cell) -> Linear:
    if not isinstance(cell, Linear):
        raise TypeError(f"no sharding is known for '{at}' of class {type(cell).__name__}")
    return cell


def _rotary(at: str, cell: RotaryEmbedding, heads: Layout = HEADS) -> Table:
    """Heads and tables ``[seq, head_dim]``, or ``[batch, 1, seq, head_dim]`` where positions come with the batch."""
    table: Layout = (BATCH, None, SEQUENCE, None) if cell.tables_of_rows else (SEQUENCE, None)
    return {
        f"{at}.mul_cos": on(heads, table),
        f"{at}.mul_sin": on(heads, table),
        f"{at}.add": on(heads, heads),
        f"{at}.neg": on(heads),
        f"{at}.split": on(heads),
        f"{at}.concat": on(heads, heads),
    }


def _feed_forward(at: str, cell: FeedForward, rows: Dimension) -> Table:
    """Return layouts with a split inner width. The down projection sums over it."""
    table = _split_output(f"{at}.w1", cell.w1)
    if cell.gated:
        table |= _split_output(f"{at}.w3", cell.w3)
        table[f"{at}.mul"] = on(INNER, INNER)
    return table | _split_input(f"{at}.w2", cell.w2, rows)


def _mixture(at: str, cell: Experts, rows: Dimension) -> Table:
    """Experts, and the shared one as any feed-forward; its gate is one number per token."""
    table = routed_experts(at, cell, rows)
    hidden: Layout = (rows, None)
    if cell.has_shared:
        table |= _feed_forward(f"{at}.shared", cell.shared, rows)
        table[f"{at}.shared_add"] = on(hidden, hidden)
    if cell.gated:
        table[f"{at}.shared_gate.matmul"] = on(hidden, (None, None))
        table[f"{at}.sigmoid"] = on(hidden)
        table[f"{at}.gate_mul"] = on(hidden, hidden)
    return table


FEED_FORWARDS: dict[type[nn.Cell], Callable[..., Table]] = {FeedForward: _feed_forward, Experts: _mixture}


def _chunks(at: str, cell: nn.Cell) -> Table:
    """Hidden states ``[batch, seq, hidden]``, labels and losses ``[batch, seq]`` in slices of the sequence, or of the part of it
    that each rank has: ``[batch, ranks, seq / ranks, hidden]``.
    """
    if not isinstance(cell, SequenceChunks):
        return {}
    columns: Layout = (*(BATCH, SEQUENCE)[: len(cell.around)], None)
    return {
        f"{at}.split_hidden": on((*columns, None)),
        f"{at}.split_labels": on(columns),
        f"{at}.concat": on(*[columns] * cell.chunks),
    }


def _head_and_loss(lm: CausalLM, unsplit_vocabulary: bool, is_split: bool) -> Table:
    """Logits ``[tokens, vocab]`` stay split by vocabulary: only sums of ``[tokens]`` are exchanged.

    A tied head has the layout of the embedding. Where that is whole, tokens are split over all devices instead. Rows of a
    normalised head that ``is_split`` are divided by their lengths on all devices, each some of them: integers cannot say that
    data-parallel devices hold copies of a tensor-parallel part.
    """
    rows, columns = (SPREAD, None) if unsplit_vocabulary else (TOKENS, "tp")
    logits, column, token = (rows, columns), (rows, None), (rows,)
    loss = "cross_entropy"
    return {
        **(_unit_rows("unit_rows", lm.unit_rows, (SPREAD if is_split else columns, None)) if lm.normalised else {}),
        **_head("lm_head", lm.lm_head, rows, columns),
        f"{loss}.max": on(logits),
        f"{loss}.sub": on(logits, column),
        f"{loss}.exp": on(logits),
        f"{loss}.sum": on(logits),
        f"{loss}.log": on(token),
        f"{loss}.onehot": on(logits, SCALAR, SCALAR),
        f"{loss}.mul": on(logits, logits),
        f"{loss}.target_sum": on(logits),
        f"{loss}.loss": on(token, token),
        "mul": on(token, token),
        "sum": on(token),
        **(_sequence_losses() if lm.adds_balance else {}),
    }


def _token_shifts(lm: CausalLM, rows: Dimension) -> Table:
    """Return layouts of columns ``[batch, seq]`` shifted by some tokens, and of losses ``[tokens]`` of predictions."""
    column: Layout = (BATCH, None)
    token: Layout = (rows,)
    table: Table = {"add_prediction": on(SCALAR, SCALAR)}
    for number in range(len(lm.ahead)):
        shift, loss = f"ahead.{number}", f"prediction_losses.{number}"
        table |= {
            **{f"{shift}.{name}": on(column, (None,)) for name in ("gather", "gather_labels", "gather_mask")},
            f"{shift}.there": on(column, (None, None)),
            f"{loss}.mul": on(token, token),
            f"{loss}.sum": on(token),
            f"{loss}.tokens": on(token),
            f"{loss}.scale": on(SCALAR, SCALAR),
            f"{loss}.join": on((None,), (None,)),
            f"{loss}.weigh": on((None,), (None,)),
            f"{loss}.probe_sum": on((None,)),
            f"{loss}.add": on(SCALAR, SCALAR),
        }
        if lm.ahead[number].documents:
            table |= {f"{shift}.{name}": on(column, column) for name in ("same_document", "inside")}
            table[f"{shift}.gather_starts"] = on(column, (None,))
    return table


def _sequence_losses() -> Table:
    """Return layouts of the losses that layers add per sequence, times the number of its tokens."""
    return {
        "tokens_of_rows": on((BATCH, None)),
        "balance_mul": on((BATCH,), (BATCH,)),
        "balance_sum": on((BATCH,)),
        "add_balance": on(SCALAR, SCALAR),
    }


def _head(at: str, cell: Head, rows: Dimension, columns: Dimension) -> Table:
    capped = soft_cap(f"{at}.soft_cap", cell.soft_cap, (rows, columns)) if cell.capped else {}
    return {f"{at}.matmul": on((rows, None), (columns, None)), **capped}


def _unit_rows(at: str, cell: UnitRows, weight: Layout) -> Table:
    return {
        f"{at}.square": on(weight),
        f"{at}.sum": on(weight),
        f"{at}.maximum": on(weight, SCALAR),
        f"{at}.rsqrt": on(weight),
        f"{at}.mul": on(weight, weight),
    }
