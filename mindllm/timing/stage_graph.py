"""The time of one pipeline stage of anybody's program, from its compiled graph: passes of a micro-batch, and what is done once.

Which layers a stage holds, of which type, and what they compute again is read from the graph, too. A layer is a numbered cell
(``decoder.layers.3``); layers with parameters of the same names and shapes are of one type.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindllm.compiled.graph.compiled_graph import CompiledGraph, Node
from mindllm.compiled.graph.cost import WITHOUT_TRAFFIC, bytes_of, uncounted
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED, UPDATE, Operators, is_flagged
from mindllm.timing.costs.of_graph import operator_time, transfer_time
from mindllm.timing.device import Device

NUMBERED = re.compile(r"((?:\w+\.)*?\w+)\.(\d+)(?=\.|$)")
MICRO_INPUTS = "micro_inputs"  # of MindSpore's pipeline cell: numbered, and no layers
BETWEEN_STAGES = frozenset({"Send", "Receive"})
PASSES = (FORWARD, RECOMPUTED, BACKWARD)
WHOLE_LAYER = 0.8  # of the operators of a layer that is recomputed as a whole
NONE, SELECT, COMMUNICATION, ALL_RECOMPUTED = "none", "select", "comm", "full"
Type = frozenset[tuple[str, tuple[int, ...]]]  # names and shapes of a layer's parameters


@dataclass(frozen=True)
class SeenLayer:
    """A layer of a stage; ``recompute`` is ``none``, ``select``, ``comm`` or ``full``, ``repeated`` what is computed again."""

    number: int
    type: Type
    recompute: str
    repeated: frozenset[str]


@dataclass(frozen=True)
class StageGraph:
    """Milliseconds of a stage on a device: of one micro-batch by phase, and ``once`` per step.

    Attributes:
        list_of_layers: the cells that are the layers, as ``model.decoder.layers``.
        sent: of the largest tensor that goes to another stage.
        uncounted: operators whose operations are not known; only their bytes take time.
    """

    layers: tuple[SeenLayer, ...]
    list_of_layers: str
    micro_batches: int
    chunks: int
    passes: Mapping[str, float]
    once: float
    sent: float
    uncounted: tuple[str, ...]

    @property
    def forward(self) -> float:
        """Of a micro-batch."""
        return self.passes[FORWARD]

    @property
    def backward(self) -> float:
        """Of a micro-batch, with what is computed again."""
        return self.passes[BACKWARD] + self.passes[RECOMPUTED]


def stage_graphs(graphs: Sequence[CompiledGraph], device: Device) -> list[StageGraph]:
    """Adds up the operators of the stages of a program, whose layers are one list of cells.

    Raises:
        UserError: the device lacks a figure or a link that they need.
    """
    layers = list_of_layers(map(Operators, graphs))
    return [_stage_graph(graph, layers, device) for graph in graphs]


def _stage_graph(graph: CompiledGraph, list_of_cells: str, device: Device) -> StageGraph:
    operators = Operators(graph)
    micro_batches, inside = micro_batches_of(graph), _pass_functions(graph)
    sums: defaultdict[str, float] = defaultdict(float)
    once = sent = 0.0
    for node in operators.nodes:
        if node.op in BETWEEN_STAGES:
            if node.op == "Send":
                sent = max(sent, transfer_time(bytes_of(node.tensors), _distance(node), device))
            continue
        spent, phase = operator_time(graph, node, device) * operators.times(node), operators.phase(node)
        if operators.function_of[node.name] in inside if inside else phase != UPDATE:
            sums[phase if phase in PASSES else FORWARD] += spent / micro_batches
        else:
            once += spent
    passes = {phase: sums[phase] for phase in PASSES}
    layers = seen_layers(operators, list_of_cells)
    return StageGraph(layers, list_of_cells, micro_batches, chunks_of(graph), passes, once, sent, uncounted(graph))


def micro_batches_of(graph: CompiledGraph) -> int:
    """How many micro-batches a step has: as the compiler numbers them, or as often as the reused network runs."""
    numbered = [node.micro_batch for node in graph.nodes() if node.micro_batch is not None]
    runs = [graph.executions[function.name] for function in graph.functions if function.role == FORWARD]
    return max([1, *(number + 1 for number in numbered), *runs])


def chunks_of(graph: CompiledGraph) -> int:
    """Chunks of an interleaved pipeline."""
    return 1 + max((node.primal.get("chunk", 0) for node in graph.nodes() if node.op in BETWEEN_STAGES), default=0)


def _pass_functions(graph: CompiledGraph) -> set[str]:
    """The functions that are run for every micro-batch; empty where the step is one function."""
    return {function.name for function in graph.functions if function.role in (FORWARD, BACKWARD)}


def _distance(node: Node) -> int:
    ranks = node.ranks
    return max(1, max(ranks) - min(ranks)) if ranks else 1


def list_of_layers(stages: Iterable[Operators]) -> str:
    """The list of cells that is the model's layers: the one with most members on all stages; empty where nothing is numbered."""
    members: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    weights: Counter[str] = Counter()
    for stage, operators in enumerate(stages):
        for node in operators.nodes:
            found = NUMBERED.match(operators.place(node)) if operators.phase(node) == FORWARD else None
            if found and not found[1].endswith(MICRO_INPUTS):
                members[found[1]].add((stage, int(found[2])))
                weights[found[1]] += 1
    return max(members, key=lambda name: (len(members[name]), weights[name]), default="")


def number_in(place: str, layers: str) -> int | None:
    """The number of the layer of the list ``layers`` that a place is in."""
    found = NUMBERED.match(place)
    return int(found[2]) if found and found[1] == layers else None


def seen_layers(operators: Operators, layers: str) -> tuple[SeenLayer, ...]:
    """The layers of a stage in the list of cells ``layers``, in order."""
    forward: defaultdict[int, list[Node]] = defaultdict(list)
    repeated: defaultdict[int, dict[str, Node]] = defaultdict(dict)
    for node in operators.nodes:
        place, phase = operators.place(node), operators.phase(node)
        number = number_in(place, layers)
        if number is None or node.op in WITHOUT_TRAFFIC:  # a view that is repeated costs nothing
            continue
        if phase == FORWARD:
            forward[number].append(node)
        elif phase == RECOMPUTED:
            repeated[number][f"{place[len(layers) + 1 :].partition('.')[2]}/{node.op}"] = node
    names = list(operators.graph.parameters)
    prefix = _parameters_of(layers, names)
    return tuple(
        SeenLayer(
            number,
            _type(operators.graph, f"{prefix}.{number}."),
            _recomputation(forward[number], repeated[number].values()),
            frozenset(repeated[number]),
        )
        for number in sorted(forward)
    )


def _recomputation(forward: Iterable[Node], repeated: Iterable[Node]) -> str:
    """``full`` where nearly every operator that computes was asked for; otherwise what the repeated ones are.

    Networks leave a few out of whole layers: the choice of experts of MindFormers, whose counts must not be made twice.
    """
    again = list(repeated)
    if not again:
        return NONE
    asked = [is_flagged(node) for node in forward if not node.exchanges]
    if sum(asked) >= WHOLE_LAYER * len(asked):
        return ALL_RECOMPUTED
    return COMMUNICATION if all(node.exchanges for node in again) else SELECT


def _parameters_of(layers: str, names: Iterable[str]) -> str:
    """How names of parameters begin that are in ``layers``: the longest end of it that one of them has."""
    levels, known = layers.split("."), list(names)
    for start in range(len(levels)):
        ending = ".".join(levels[start:])
        if any(re.search(rf"(^|\.){re.escape(ending)}\.\d+\.", name) for name in known):
            return ending
    return layers


def _type(graph: CompiledGraph, prefix: str) -> Type:
    found = re.compile(rf"(?:^|\.){re.escape(prefix)}(.*)")
    shapes = ((found.search(name), held.shape) for name, held in graph.parameters.items())
    return frozenset((match[1], shape) for match, shape in shapes if match)
