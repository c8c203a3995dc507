"""How every operator of the decoder is split over the devices of a stage: one table from operator path to layouts.

Tensor parallelism splits heads, the feed-forward width and the vocabulary (Shoeybi et al., 2019); with sequence
parallelism the tokens between those parts are split over the same devices (Korthikanti et al., 2022). Layouts name the
axes of the mesh, one entry per dimension: ``(TOKENS, None)`` is a matrix whose rows are split over data parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mindspore import nn
from mindspore.ops import Primitive

from mindllm.config import ModelConfig
from mindllm.config.parallel import ParallelConfig
from mindllm.errors import nearest
from mindllm.models import Kernels
from mindllm.parallel.layout import Dimension, Layout, Mesh
from mindllm.parallel.operators import operators

FOLLOWERS = frozenset({"Cast", "Reshape"})
"""Operators without an entry: the compiler gives them the layouts of their neighbours."""

TOKENS: Dimension = "dp"
SPREAD: Dimension = ("dp", "tp")
SCALAR: Layout = ()
HEADS: Layout = ("dp", "tp", None, None)  # [batch, heads, seq, head_dim]


@dataclass(frozen=True)
class Sharding:
    """Layouts of an operator's tensor inputs and, where the compiler must be told, of its output."""

    inputs: tuple[Layout, ...]
    output: Layout | None = None


def on(*inputs: Layout, out: Layout | None = None) -> Sharding:
    """The sharding with these layouts of the inputs."""
    return Sharding(inputs, out)


def sharding_table(model: ModelConfig, kernels: Kernels, parallel: ParallelConfig) -> dict[str, Sharding]:
    """Shardings by pattern of operator paths (``*`` and ``[...]`` as in file names, within one level)."""
    rows = SPREAD if parallel.use_seq_parallel else TOKENS  # of hidden states between attention and feed-forward
    layer = "model.layers.*"
    return {
        **_embedding("model.tok_embeddings", rows, parallel.vocab_emb_dp),
        **_norm(f"{layer}.attention_norm", rows, kernels.fused),
        **_projections(f"{layer}.attention", rows, model),
        **_rotary(f"{layer}.attention.rotary"),
        **_attention(f"{layer}.attention.attention", kernels.flash_attention),
        f"{layer}.attention_add": on((rows, None), (rows, None)),
        **_norm(f"{layer}.ffn_norm", rows, kernels.fused),
        **_feed_forward(f"{layer}.feed_forward", rows),
        f"{layer}.ffn_add": on((rows, None), (rows, None)),
        **_norm("model.norm_out", rows, kernels.fused),
        **_chunks("losses", model.loss_chunks),
        **_head_and_loss(whole_vocabulary=model.tie_word_embeddings and parallel.vocab_emb_dp),
    }


def _embedding(at: str, rows: Dimension, whole_table: bool) -> dict[str, Sharding]:
    """Weight ``[vocab, hidden]`` and ids ``[tokens]``. A split table looks up its part and adds the parts."""
    if whole_table:
        return {f"{at}.gather": on((None, None), (rows,))}
    return {f"{at}.gather": on(("tp", None), (TOKENS,), out=(rows, None))}


def _norm(at: str, rows: Dimension, fused: bool) -> dict[str, Sharding]:
    """Hidden states ``[tokens, hidden]`` and weight ``[hidden]``."""
    if fused:
        return {f"{at}.norm": on((rows, None), (None,))}
    return {
        f"{at}.square": on((rows, None)),
        f"{at}.mean": on((rows, None)),
        f"{at}.add": on((rows, None), SCALAR),
        f"{at}.rsqrt": on((rows, None)),
        f"{at}.mul": on((rows, None), (rows, None)),
        f"{at}.norm": on((rows, None), (None,)),
    }


def _projections(at: str, rows: Dimension, model: ModelConfig) -> dict[str, Sharding]:
    """Weights ``[out, in]``: query, key and value are split by heads, the output projection sums over heads."""
    qkv_bias = {f"{at}.w[qkv].bias_add": on((TOKENS, "tp"), ("tp",))}
    out_bias = {f"{at}.wo.bias_add": on((rows, None), (None,))}  # once, after the sum
    return {
        f"{at}.w[qkv].matmul": on((TOKENS, None), ("tp", None)),
        **(qkv_bias if model.qkv_has_bias else {}),
        f"{at}.transpose": on((TOKENS, None, "tp", None)),
        f"{at}.merge_transpose": on(HEADS),
        f"{at}.wo.matmul": on((TOKENS, "tp"), (None, "tp"), out=(rows, None)),
        **(out_bias if model.attn_proj_has_bias else {}),
    }


def _rotary(at: str) -> dict[str, Sharding]:
    """Heads and tables ``[seq, head_dim]``."""
    table: Layout = (None, None)
    return {
        f"{at}.mul_cos": on(HEADS, table),
        f"{at}.mul_sin": on(HEADS, table),
        f"{at}.add": on(HEADS, HEADS),
        f"{at}.neg": on(HEADS),
        f"{at}.split": on(HEADS),
        f"{at}.concat": on(HEADS, HEADS),
    }


def _attention(at: str, flash: bool) -> dict[str, Sharding]:
    """Query, key, value, and the mask, which has only sequence dimensions."""
    mask: Layout = (None, None)
    if flash:
        return {f"{at}.flash_attention": on(HEADS, HEADS, HEADS, mask)}
    return {
        f"{at}.mul": on(HEADS, SCALAR),
        f"{at}.scores": on(HEADS, HEADS),
        f"{at}.add": on(HEADS, mask),
        f"{at}.softmax": on(HEADS),
        f"{at}.context": on(HEADS, HEADS),
    }


def _feed_forward(at: str, rows: Dimension) -> dict[str, Sharding]:
    """Weights ``[out, in]``: the inner width is split, the down projection sums over it."""
    return {
        f"{at}.w[13].matmul": on((TOKENS, None), ("tp", None)),
        f"{at}.w1.activation.silu": on((TOKENS, "tp")),
        f"{at}.mul": on((TOKENS, "tp"), (TOKENS, "tp")),
        f"{at}.w2.matmul": on((TOKENS, "tp"), (None, "tp"), out=(rows, None)),
    }


def _chunks(at: str, chunks: int) -> dict[str, Sharding]:
    """Hidden states ``[batch, seq, hidden]``, labels and losses ``[batch, seq]`` in slices of the sequence."""
    if chunks == 1:
        return {}
    columns: Layout = (TOKENS, None)
    return {
        f"{at}.split_hidden": on((TOKENS, None, None)),
        f"{at}.split_labels": on(columns),
        f"{at}.concat": on(*[columns] * chunks),
    }


def _head_and_loss(whole_vocabulary: bool) -> dict[str, Sharding]:
    """Logits ``[tokens, vocab]`` stay split by vocabulary: only sums of ``[tokens]`` are exchanged.

    A tied head has the layout of the embedding. Where that is whole, tokens are split over all devices instead.
    """
    rows, columns = (SPREAD, None) if whole_vocabulary else (TOKENS, "tp")
    logits, one, token = (rows, columns), (rows, None), (rows,)
    loss = "cross_entropy"
    return {
        "lm_head.matmul": on((rows, None), (columns, None)),
        f"{loss}.max": on(logits),
        f"{loss}.sub": on(logits, one),
        f"{loss}.exp": on(logits),
        f"{loss}.sum": on(logits),
        f"{loss}.log": on(token),
        f"{loss}.onehot": on(logits, SCALAR, SCALAR),
        f"{loss}.mul": on(logits, logits),
        f"{loss}.target_sum": on(logits),
        f"{loss}.loss": on(token, token),
        "mul": on(token, token),
        "sum": on(token),
    }


def apply_sharding(model: nn.Cell, table: Mapping[str, Sharding], mesh: Mesh) -> None:
    """Shards every operator of ``model`` as ``table`` says.

    Raises:
        ValueError: an entry that matches no operator, an operator without an entry, or layouts the mesh cannot hold.
    """
    found = operators(model)
    for pattern in table:
        if not any(_matches(pattern, path) for path in found):
            raise ValueError(f"sharding table: '{pattern}' matches no operator{nearest(pattern, found)}")
    for path, operator in found.items():
        if operator.name in FOLLOWERS:
            continue
        _shard(path, operator, sharding_of(path, table), mesh)
    for parameter in model.get_parameters():
        if not parameter.requires_grad:
            parameter.parallel_optimizer = False  # tables and masks: nothing an optimizer would hold


def sharding_of(path: str, table: Mapping[str, Sharding]) -> Sharding:
    """The entry of an operator; ``ValueError`` when there is none, or more than one."""
    entries = [pattern for pattern in table if _matches(pattern, path)]
    if len(entries) != 1:
        raise ValueError(f"sharding table: {len(entries)} entries for operator '{path}'; there must be one")
    return table[entries[0]]


def _shard(path: str, operator: Primitive, sharding: Sharding, mesh: Mesh) -> None:
    layouts = sharding.inputs if sharding.output is None else (*sharding.inputs, sharding.output)
    try:
        mesh.check(layouts)
    except ValueError as error:
        raise ValueError(f"sharding of '{path}': {error}") from None
    inputs = tuple(mesh.strategy(layout) for layout in sharding.inputs)
    if sharding.output is None:
        operator.shard(inputs)
    else:
        operator.shard(inputs, (mesh.strategy(sharding.output),))


def _matches(pattern: str, path: str) -> bool:
    levels, names = pattern.split("."), path.split(".")
    return len(levels) == len(names) and all(map(fnmatchcase, names, levels))
