"""Which layers a rank holds and runs, in which chunk, and how often in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mindllm import axes
from mindllm.architecture.optimizer_state import updated_weights
from mindllm.compiled.conformance.expected import AskedLayer, AskedPlan, asked_plan, runs_of_a_layer
from mindllm.compiled.conformance.finding import Finding, Mistake, numbers_text, together
from mindllm.compiled.graph.compiled_graph import Node
from mindllm.compiled.graph.operators import Operators, layer_of
from mindllm.compiled.graph.schedule import FORWARD as FORWARD_PASS
from mindllm.compiled.graph.schedule import micro_batch_schedule
from mindllm.config import RunConfig
from mindllm.parallel.layer_plan import LayerAssignment, make_plan
from mindllm.parallel.layout import Mesh

ATTENTION = "attention.attention"  # the cell of scores and what they weigh, in a layer
SCORED = ("FlashAttentionScore", "Softmax")
"""What reads or makes the scores of a layer; dimension 1 of its first output counts heads, dimension 2 the queries' positions."""
QUERIES = 2
SENT, TAG = (
    ("Send", "Receive"),
    "sr_tag",
)  # by its tag the compiler knows a message and the one that brings its gradient


def attention_scores(rank: Operators) -> Iterator[tuple[Node, int]]:
    """Yield the operators that make or read the scores of layers in the forward pass, with the number of the layer."""
    for node, layer, place in rank.forward_in_layers:
        if node.op in SCORED and place.startswith(ATTENTION) and len(node.shapes[0]) == 4:
            yield node, layer


def messages(rank: Operators) -> Iterator[Node]:
    """Yield what a stage sends and receives, except shared weights and their gradients."""
    found = [node for node in rank.nodes if node.op in SENT and node.shapes]
    of_weights = {node.attributes.get(TAG) for node in found if rank.parameter(node.inputs[0])}
    yield from (node for node in found if node.attributes.get(TAG) not in of_weights)


def positions_of_rank(config: RunConfig) -> int:
    """Return the number of positions of a sequence, or of a piece of it, whose queries one rank has in attention."""
    sizes = config.parallel_config
    whole = config.model.config.seq_length // (1 if sizes.exchanges_heads else sizes.size(axes.CONTEXT))
    return whole // sizes.seq_split_num


def scored_positions(config: RunConfig) -> int:
    """Return the number of query positions that a rank scores in one run of a layer.

    In a ring they count for each block of keys. With balanced halves, where late queries see all early keys, one piece counts
    once more.
    """
    positions, sizes = positions_of_rank(config), config.parallel_config
    if not sizes.passes_keys:
        return positions
    pieces, ranks = pieces_of_rank(config), sizes.size(axes.CONTEXT)
    return positions // pieces * (pieces * ranks + pieces - 1)


def pieces_of_rank(config: RunConfig) -> int:
    """Return the number of pieces in which a rank has its positions: one of each half with balanced halves."""
    return 2 if config.parallel_config.context_parallel_balanced else 1


def stages(config: RunConfig, plan: AskedPlan, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """Compare the layers that a stage updates and runs with the plan. Frozen layers are only run."""
    if plan.stages == 1:
        return None
    expected = [_layers_of_stage(plan, stage) for stage in range(plan.stages)]
    trained = _trained_layers(config)
    found: dict[int, set[int]] = {}
    mistakes = []
    for rank in ranks:
        stage, held = mesh.stage_of(rank.graph.rank), _layers_held(rank)
        run = {layer for _, layer, _ in rank.forward_in_layers}
        found.setdefault(stage, run)
        for what, layers, planned in (("holds", held, expected[stage] & trained), ("runs", run, expected[stage])):
            if layers != planned:
                text = f"stage {stage} {what} layers {_text(layers)}, the plan has {_text(planned)} there"
                mistakes.append(Mistake(rank.graph.rank, text))
    return Finding("layers by stage", _join(expected), _join(list(found.values())), together(mistakes))


def chunks(plan: AskedPlan, mesh: Mesh, ranks: Sequence[Operators]) -> Finding | None:
    """Compare the layers of each chunk of a stage, and the order of chunks, with the plan."""
    if plan.chunks == 1:
        return None
    mistakes, texts = [], [[""] * plan.stages, [""] * plan.stages]
    for rank in ranks:
        stage = mesh.stage_of(rank.graph.rank)
        expected = [_layers_at(plan, chunk, stage) for chunk in range(plan.chunks)]
        found = _layers_by_chunk(rank)
        texts[0][stage], texts[1][stage] = (" then ".join(map(_text, layers)) for layers in (expected, found))
        if found != expected:
            text = f"stage {stage} runs layers {texts[1][stage]}, the plan has {texts[0][stage]}"
            mistakes.append(Mistake(rank.graph.rank, text))
    asked, has = (" | ".join(words) for words in texts)
    return Finding("chunks by stage", asked, has, together(mistakes))


def micro_batches(config: RunConfig, ranks: Sequence[Operators]) -> Finding | None:
    """Every layer runs once for each part of the batch: micro-batches, times pieces, accumulation steps and copies of it."""
    parts = runs_of_a_layer(config)
    found = {rank.graph.rank: _runs_of_layers(rank, scored_positions(config)) for rank in ranks}
    mistakes = [
        Mistake(rank, f"layer {layer} runs {times} times in a step, not {parts}")
        for rank, runs in found.items()
        for layer, times in sorted(runs.items())
        if times != parts
    ]
    counts = sorted({times for runs in found.values() for times in runs.values()})
    return Finding("parts of a batch", str(parts), " or ".join(map(str, counts)), together(mistakes))


def _runs_of_layers(rank: Operators, positions: int) -> dict[int, Fraction]:
    """Count how often a step runs each layer: once for scores of all ``positions`` of the rank (in a ring, for each block of
    keys).

    One run may score them in pieces (balanced halves of a sequence), and other operators may take tokens in parts
    (``fine_grain_interleave``) or serve several parts of a batch at once, so no operator by itself counts runs.
    """
    times: dict[int, Fraction] = {layer: Fraction() for _, layer, _ in rank.forward_in_layers}
    for node, layer in attention_scores(rank):
        times[layer] += Fraction(node.shapes[0][QUERIES] * rank.times(node), positions)
    return times


def _layers_of_stage(plan: AskedPlan, stage: int) -> set[int]:
    return {number for number, layer in enumerate(plan.layers) if layer.stage == stage}


def _trained_layers(config: RunConfig) -> set[int]:
    names = map(layer_of, config.model.config.architecture.trained_shapes())
    return {where[0] for where in names if where}


def _layers_at(plan: AskedPlan, chunk: int, stage: int) -> set[int]:
    return {number for number, layer in enumerate(plan.layers) if (layer.chunk, layer.stage) == (chunk, stage)}


def _layers_held(rank: Operators) -> set[int]:
    """Layers with a weight that this rank updates."""
    return {where[0] for name in updated_weights(rank.graph.parameters) if (where := layer_of(name))}


def _layers_by_chunk(rank: Operators) -> list[set[int]]:
    """Layers of each reused function, in the order in which a step first calls them."""
    of_function: dict[str, set[int]] = defaultdict(set)
    for node, layer, _ in rank.forward_in_layers:
        of_function[rank.function_of[node.name]].add(layer)
    called = [event.node.callee for event in micro_batch_schedule(rank.graph) if event.kind == FORWARD_PASS]
    return [of_function[name] for name in dict.fromkeys(called)]


def _text(layers: set[int]) -> str:
    return numbers_text(sorted(layers))


def _join(stages: Sequence[set[int]]) -> str:
    return " | ".join(map(_text, stages))


def planned(config: RunConfig) -> Finding | None:
    """Compare the plan that builds the run with the YAML's keys, layer by layer; None if there is nothing to plan."""
    asked, plan = asked_plan(config).layers, make_plan(config).layers
    if not any(layer.stage or layer.recompute or any(layer.patterns.values()) for layer in asked):
        return None
    problems = [] if len(asked) == len(plan) else [f"{len(plan)} layers are planned, not {len(asked)}"]
    problems += [
        f"layer {number} is planned {_layer_text(has)}, the YAML has it {_layer_text(expected)}"
        for number, (expected, has) in enumerate(zip(asked, plan, strict=False))
        if _layer_text(expected) != _layer_text(has)
    ]
    found = f"{len(problems)} otherwise" if problems else "all of them"
    return Finding("plan of the run", f"{len(asked)} layers", found, tuple(problems))


def _layer_text(layer: AskedLayer | LayerAssignment) -> str:
    """``on stage 1, chunk 0, recomputed``, and the patterns by key."""
    words = [f"on stage {layer.stage}", f"chunk {layer.chunk}"]
    words += ["recomputed"] * layer.recompute
    words += [f"{key} of {', '.join(sorted(names))}" for key, names in sorted(layer.patterns.items()) if names]
    return ", ".join(words)
