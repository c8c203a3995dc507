"""What a YAML asks of the graphs of its ranks, read once more from its plain keys.

The functions that build a model on its devices (the layer plan, the sharding table, the compiler's settings) are not asked: a
mistake in one of them would stand on both sides. This reading is short and imports nothing of ``mindllm/parallel``; keys mean
what they mean in MindFormers (``LayerSetting``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindllm.config import RunConfig
from mindllm.config.recompute import LayerCounts, LayerSelection

Counts = tuple[tuple[int, ...], ...]
"""Numbers of layers by ``[chunk][stage]``."""
SELECT, EXCLUDE = "select_recompute", "select_recompute_exclude"
COMMUNICATION, EXCLUDED_COMMUNICATION = "select_comm_recompute", "select_comm_recompute_exclude"
STANDARD: dict[str, tuple[str, ...]] = {
    SELECT: (r"feed_forward\.mul", r"feed_forward\.w1\.activation\..*"),
    COMMUNICATION: (r".*\.norm",),
    EXCLUDE: (),
    EXCLUDED_COMMUNICATION: (),
}
"""By key of ``recompute_config``: the patterns that counts without patterns stand for."""
OF_A_PIPELINE = 2  # the number of the one message that a stage's gradients are exchanged in
FUSED_ATTENTION = r"attention\.attention\.flash_attention"  # is swapped where nothing is named


@dataclass(frozen=True)
class AskedLayer:
    """Where a layer is to be and what of it is to be computed again; ``patterns`` by key of ``recompute_config``."""

    stage: int
    chunk: int
    recompute: bool
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def applied(self, key: str) -> tuple[str, ...]:
        """Return the patterns under one key."""
        return self.patterns.get(key, ())

    def is_default(self, key: str) -> bool:
        """Return True if the patterns are those that a count stands for. A layer need not have each of them."""
        return len(STANDARD[key]) > 1 and set(self.applied(key)) == set(STANDARD[key])


@dataclass(frozen=True)
class AskedPlan:
    """All layers in the order of the model."""

    stages: int
    chunks: int
    layers: tuple[AskedLayer, ...]


def asked_plan(config: RunConfig) -> AskedPlan:
    """Layers are dealt out chunk by chunk, inside a chunk stage by stage; counts take the first layers of a place.

    With ``zero_bubble_v`` the second chunk is dealt out from the last stage to the first.
    """
    model, stages = config.model.config, config.parallel_config.pipeline_stage
    held = _layers_held(model.layer_count, stages, model.pp_interleave_num, model.offset)
    recompute = config.recompute_config
    whole = _first_layers(recompute.recompute, held)
    selected = {key: _selected(key, getattr(recompute, key), held) for key in STANDARD}
    layers = []
    back = config.parallel.pipeline_config.pipeline_scheduler == "zero_bubble_v"
    for chunk, row in enumerate(held):
        order = range(stages - 1, -1, -1) if back and chunk == 1 else range(stages)
        for stage in order:
            for index in range(row[stage]):
                is_whole = index < whole[chunk][stage]
                keys = (EXCLUDE, EXCLUDED_COMMUNICATION) if is_whole else tuple(STANDARD)
                patterns = {
                    key: tuple(name for name, counts in selected[key].items() if index < counts[chunk][stage])
                    for key in keys
                }
                layers.append(AskedLayer(stage, chunk, is_whole, patterns))
    return AskedPlan(stages, len(held), tuple(layers))


def _layers_held(layers: int, stages: int, chunks: int, offset: int | Sequence) -> Counts:
    """``layers // (stages · chunks)`` in each place, and what ``offset`` adds there."""
    even = layers // (stages * chunks)
    if isinstance(offset, int):
        return ((even + offset,) * stages,) * chunks
    rows = offset if isinstance(offset[0], Sequence) else [offset] * chunks
    return tuple(tuple(even + more for more in row) for row in rows)


def _first_layers(value: LayerCounts, held: Counts) -> Counts:
    """Return the number of first layers of each place that ``value`` covers: all or none, by stage, or by chunk and stage."""
    if isinstance(value, bool):
        return tuple(tuple(count * value for count in row) for row in held)
    if isinstance(value[0], tuple):
        return tuple(
            tuple(count if expected is True else int(expected) for expected, count in zip(row, counts, strict=True))
            for row, counts in zip(value, held, strict=True)
        )
    taken = [[0] * len(row) for row in held]
    for stage, expected in enumerate(value):
        left = sum(row[stage] for row in held) if expected is True else int(expected)
        while left > 0 and any(taken[chunk][stage] < row[stage] for chunk, row in enumerate(held)):
            for chunk, row in enumerate(held):  # one layer of each chunk in turn
                if left > 0 and taken[chunk][stage] < row[stage]:
                    taken[chunk][stage] += 1
                    left -= 1
    return tuple(map(tuple, taken))


def _selected(key: str, value: LayerSelection, held: Counts) -> dict[str, Counts]:
    """By pattern the first layers of each place that it is for."""
    if isinstance(value, dict):
        return {pattern: _first_layers(counts, held) for pattern, counts in value.items()}
    if isinstance(value, tuple) and isinstance(value[0], str):
        return {str(pattern): held for pattern in value}
    return dict.fromkeys(STANDARD[key], _first_layers(value, held))  # type: ignore[arg-type]


def message_of_layer(config: RunConfig, number: int) -> int:
    """Return the number of the message with the gradients of a layer: one for each group of layers, or for a stage."""
    groups = config.parallel_config.gradient_aggregation_group
    if config.parallel_config.pipeline_stage > 1:
        return OF_A_PIPELINE
    return number // max((config.model.config.layer_count + 1) // groups, 1) + 1


def message_of_others(config: RunConfig) -> int:
    """Return the number of the message with embedding, final norm and head: that of the last group."""
    if config.parallel_config.pipeline_stage > 1:
        return OF_A_PIPELINE
    return config.parallel_config.gradient_aggregation_group


def shards_accumulators(config: RunConfig) -> bool:
    """Return True if gradients are accumulated in shards: by its key, or because weights are gathered again."""
    if not config.parallel.enable_parallel_optimizer:
        return False
    return gathers_again(config) or config.parallel.parallel_optimizer_config.gradient_accumulation_shard


def gathers_again(config: RunConfig) -> bool:
    """Return True if weights are sharded between their uses."""
    return config.parallel.enable_parallel_optimizer and config.recompute_config.parallel_optimizer_comm_recompute


def swapped(config: RunConfig, number: int) -> dict[str, int]:
    """Return the patterns of a layer to swap to the host (empty: the layer), with their prefetch distance in operators."""
    section = config.swap_config
    if not section.swap:
        return {}
    if section.layer_swap is None and section.op_swap is None:
        return {FUSED_ATTENTION: section.default_prefetch}
    whole = [(one, "") for one in section.layer_swap or ()]
    some = [(one, pattern) for one in section.op_swap or () for pattern in one.op_name]
    found: dict[str, int] = {}
    for one, pattern in (*whole, *some):
        if one.layers is True or (not isinstance(one.layers, bool) and number in one.layers):
            found.setdefault(pattern, one.backward_prefetch)
    return found


@dataclass(frozen=True)
class Rows:
    """Rows of matrices ``[tokens, …]`` on one rank, in one run of the layers.

    ``inside`` are those of products in attention and feed-forward, ``between`` those of hidden states around them.
    """

    inside: int
    between: int


def rows_of_rank(config: RunConfig) -> Rows:
    """Return the rows of hidden states on a rank.

    A part of a batch has ``batch_size`` sequences on a data-parallel rank. Context parallelism cuts each of them, and
    ``seq_split_num`` sends pieces of each through the pipeline, one after another.
    """
    sizes = config.parallel_config
    tokens = config.runner_config.batch_size // config.micro_batch_interleave_num * config.model.config.seq_length
    inside = tokens // sizes.context_parallel // sizes.seq_split_num
    return Rows(inside, inside // sizes.model_parallel if sizes.use_seq_parallel else inside)


def rows_of_head(config: RunConfig) -> int:
    """Rows of logits that a rank has at a time: those of a slice of the loss; where the head is the whole embedding, those of a
    tensor-parallel rank alone.
    """
    sizes, model = config.parallel_config, config.model.config
    is_whole = model.tie_word_embeddings and sizes.vocab_emb_dp
    return rows_of_rank(config).inside // (sizes.model_parallel if is_whole else 1) // model.loss_chunks


def gathered_elements(config: RunConfig) -> int:
    """Return the elements of hidden states that a rank gathers from tensor-parallel ranks before each part of a layer.

    With sequence parallelism these are all rows, else none, because rows are whole.
    """
    sizes = config.parallel_config
    is_cut = sizes.use_seq_parallel and sizes.model_parallel > 1
    return rows_of_rank(config).inside * config.model.config.hidden_size if is_cut else 0


def exchanged_with_experts(config: RunConfig) -> int | None:
    """Return the elements that a rank exchanges with its experts in each direction in one run of a layer; None if unknown here.

    Each expert has as many places of a sequence as its capacity, or as the sequence has tokens. Where tokens are sorted, or
    ranks share a sequence, they are not exchanged by place.
    """
    model, sizes = config.model.config, config.parallel_config
    alike = sizes.expert_model_parallel in (None, sizes.model_parallel)
    if model.moe_grouped_gemm or sizes.context_parallel > 1 or sizes.expert_parallel > sizes.data_parallel or not alike:
        return None
    if sizes.expert_parallel == 1:
        return 0
    places = model.seq_length
    if model.capacity_factor is not None:
        share = model.capacity_factor * model.num_experts_chosen * model.seq_length / model.expert_num
        places = min(math.ceil(share), model.seq_length)
    sequences = config.runner_config.batch_size // config.micro_batch_interleave_num
    return sequences * model.expert_num * places * model.hidden_size


def runs_of_a_layer(config: RunConfig) -> int:
    """Run of each layer in a step: micro-batches or their pieces, times accumulation steps, times copies of the model."""
    parts = config.parallel_config.micro_batch_num * config.runner_config.gradient_accumulation_steps
    return parts * config.parallel_config.seq_split_num * config.micro_batch_interleave_num


def parts_in_flight(config: RunConfig, stage: int) -> int:
    """Return how many passes at most wait for their backward pass on a stage.

    With GPipe all of them wait; with 1F1B one for each following stage, and with several chunks those that fill the stages
    (Narayanan et al., 2021, section 2.2). If stages do not divide the parts, MindSpore puts the remainder into the first round.
    In a V every stage waits for as many as there are places, because the first part passes all of them (Qi et al., 2024,
    2405.15362, section 4.1).
    """
    scheduler = config.parallel.pipeline_config.pipeline_scheduler
    sizes, chunks = config.parallel_config, config.model.config.pp_interleave_num
    passes, behind = sizes.micro_batch_num * chunks, sizes.pipeline_stage - stage - 1
    if scheduler in ("seqpipe", "seqvpp", "seqsmartvpp"):
        return _in_flight_of_dealt_parts(config, scheduler, behind)
    if scheduler == "gpipe":
        return passes
    if scheduler == "zero_bubble_v":
        return sizes.pipeline_stage * chunks
    if chunks == 1:
        return min(passes, behind + 1)
    first_round = sizes.pipeline_stage + sizes.micro_batch_num % sizes.pipeline_stage
    return min(passes, 2 * behind + (chunks - 1) * first_round + 1)


def _in_flight_of_dealt_parts(config: RunConfig, scheduler: str, behind: int) -> int:
    """Return the passes in flight if a part may come in pieces, all of which go forward before the first goes back.

    MindSpore spreads the remainder over all rounds: the first one has one more part. ``seqsmartvpp`` starts its backward passes
    earlier, one pass for each later stage instead of two. With ``seqpipe`` the parts of a round fill the stages in pieces.
    """
    sizes, chunks = config.parallel_config, config.model.config.pp_interleave_num
    parts, pieces = sizes.micro_batch_num, sizes.seq_split_num
    of_round = sizes.pipeline_stage // (1 if scheduler == "seqpipe" or chunks == 1 else pieces)
    rounds = max(parts // of_round, 1)
    first_round = (parts // rounds + bool(parts % rounds)) * pieces
    each = 1 if chunks == 1 or scheduler == "seqsmartvpp" else 2
    return min(parts * chunks * pieces, each * behind + (chunks - 1) * first_round + pieces)


def neighbours(config: RunConfig, rank: int) -> tuple[int, ...]:
    """Return the tensor-parallel ranks of ``rank``, including itself."""
    count = config.parallel_config.model_parallel
    first = rank - rank % count
    return tuple(range(first, first + count))


BY_ROWS = ("wq", "wk", "wv", "wq_up_plain", "wq_up_rotary", "wq_plain", "wq_rotary", "wk_plain", "w1", "w3")
BY_COLUMNS = ("wo", "w2")
EXPERTS = "experts"
CUT: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("weight", "codes", "scales", "zeros"), (0, 1)),
    "bias": (0, None),
    "lora_a": (None, 1),
    **dict.fromkeys(("lora_b", "lora_magnitude"), (0, None)),
    "lora_e": (None, None),
}
"""By what a projection has: the dimension that is cut where the projection is cut by rows, and where it is by columns."""


def part_of_weight(config: RunConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that tensor and expert parallelism leave of a weight on a rank; None if it is unknown here.

    Projections into heads and into the width of a feed-forward are cut by rows, those out of them by columns, and so are codes
    and adapters in their places; tables of the vocabulary by rows, and routed experts by expert and then as a feed-forward; all
    else is whole.
    """
    sizes = config.parallel_config
    *cells, own = name.split(".")
    cell = cells[-1] if cells else ""
    if EXPERTS in cells:
        inner = sizes.model_parallel if sizes.expert_model_parallel is None else sizes.expert_model_parallel
        inner_cut = 2 if cell in BY_COLUMNS else 1
        ways = [sizes.expert_parallel, *(inner if place == inner_cut else 1 for place in range(1, len(shape)))]
    elif name.startswith(("lm_head.", "model.tok_embeddings.")):
        is_whole = sizes.vocab_emb_dp and (cell == "tok_embeddings" or config.model.config.tie_word_embeddings)
        ways = [1 if is_whole else sizes.model_parallel, *[1] * (len(shape) - 1)]
    elif own in CUT and cell in (*BY_ROWS, *BY_COLUMNS):
        cut = CUT[own][cell in BY_COLUMNS]
        ways = [sizes.model_parallel if place == cut else 1 for place in range(len(shape))]
    elif own in CUT:
        ways = [1] * len(shape)
    else:
        return None
    if math.prod(ways) > 1 and len(ways) != len(shape):
        return None
    return tuple(size // way for size, way in zip(shape, ways, strict=True))


@dataclass(frozen=True)
class Dtypes:
    """What is asked to be computed and kept in which dtype.

    Attributes:
        products: products and activations of the model.
        hidden: hidden states between the parts of layers, and between stages.
        norms, softmax, rotation: inside the norms, the softmax of composed attention, and the rotation.
        frozen: weights that are not trained.
        exact: router, loss and optimizer state, which no key names.
        weights: trained weights and their gradients.
        sums: accumulators of gradients.
    """

    products: str
    hidden: str
    norms: str
    softmax: str
    rotation: str
    frozen: str
    exact: str = "float32"
    weights: str = "float32"
    sums: str = "float32"

    @property
    def is_narrow(self) -> bool:
        """Whether any is another than float32."""
        named = (self.products, self.hidden, self.norms, self.softmax, self.rotation, self.frozen, self.weights)
        return any(dtype != self.exact for dtype in named)

    @property
    def words(self) -> str:
        """The dtype of products, and those that are others."""
        named = {"hidden states": self.hidden, "norms": self.norms, "softmax": self.softmax, "rotation": self.rotation}
        others = [f"{name} {dtype}" for name, dtype in named.items() if dtype != self.products]
        others += [f"parameters {self.weights}"] * (self.weights != self.exact)
        return ", ".join([self.products, *others])


def asked_dtypes(config: RunConfig) -> Dtypes:
    """Read the dtypes from the keys of the model. Hidden states follow products unless ``fp32_residual_connection`` is set."""
    model = config.model.config
    return Dtypes(
        products=model.compute_dtype,
        hidden="float32" if model.fp32_residual_connection else model.compute_dtype,
        norms=model.layernorm_compute_type,
        softmax=model.softmax_compute_type,
        rotation=model.rotary_dtype,
        frozen=model.frozen_dtype,
        weights=model.param_init_type,
        sums="float32" if config.optimizer.accumulate_in_float32 else model.param_init_type,
    )
