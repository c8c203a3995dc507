"""Times of layers, ends and exchanges from the compiled graphs of two small stages, on a described device.

The first stage holds one layer of every recompute kind that may stand together, the last one those that are left; where layers
of a model differ there are two such stages for each type of them. Of layers that predict ahead both are last stages, with a
layer of the decoder before them; what a further such layer adds to a stage is what it takes, its lookup, head and loss included.

Operators of a layer are found by their cells; of gradients the compiler keeps those of alike layers under the name of one of
them, so what is not computed again is shared out evenly. Operators that the compiler put between cells (most of the
tensor-parallel collectives) belong to the layer whose operators read them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindllm.architecture.layer_kind import LayerKind
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph, Function, Node
from mindllm.compiled.graph.cost import bytes_of, uncounted
from mindllm.config import RunConfig
from mindllm.dry_run.kept_graphs import kept_graph
from mindllm.parallel.layout import CONTEXT, mesh_of
from mindllm.parallel.stages import FIRST, LAST, Run, Stage
from mindllm.planning.costs.layer_kinds import chains, layer_runs, main_and_ahead, recomputed
from mindllm.planning.costs.small_runs import ALL_RECOMPUTED, NOTHING_RECOMPUTED
from mindllm.planning.problem import RecomputeKind
from mindllm.reduced_runs.even import even_main_layers, even_run
from mindllm.reduced_runs.stage import Point, reduce_to_stage
from mindllm.timing.costs.of_graph import operator_time, transfer_time
from mindllm.timing.device import Device

LAYER = re.compile(r"layers-CellList/(\d+)-")
FORWARD, BACKWARD = "forward", "backward"
BEFORE = "layer of the decoder"  # that layers which predict ahead stand behind
BETWEEN_STAGES = ("Send", "Receive")


@dataclass(frozen=True)
class LayerTimes:
    """Milliseconds of a type of layers.

    Attributes:
        forward: of a micro-batch.
        backward: of a layer that recomputes nothing.
        again: what it computes again, by recompute kind.
        step: once per step: weights gathered, gradients reduced, the update.
    """

    forward: float
    backward: float
    again: Mapping[str, float]
    step: float


@dataclass(frozen=True)
class TimeCosts:
    """Milliseconds, of one micro-batch but for ``step_of_end``.

    Attributes:
        layers: by type.
        head: forward and backward of the embedding; ``tail``: of norm, output layer and loss.
        point_to_point: of a tensor between stages.
        step_of_end: of an embedding or output layer, once per step.
        uncounted: operators whose operations are not known; only their bytes take time.
    """

    layers: Mapping[str, LayerTimes]
    head: tuple[float, float]
    tail: tuple[float, float]
    point_to_point: float
    step_of_end: float
    uncounted: tuple[str, ...] = ()


def time_costs(
    config: RunConfig, layers: Mapping[str, LayerKind], kinds: Mapping[str, RecomputeKind], device: Device
) -> TimeCosts:
    """Compiles the two stages with each of the layers and adds up their operators.

    Raises:
        CompileFailed: the compiler's own error.
    """
    main, ahead = main_and_ahead(layers)
    plain = even_main_layers(config)
    found = [_of_layer(plain, layer, layers[layer], kinds, device) for layer in main]
    times = {layer: costs.layers[layer] for layer, costs in zip(main, found, strict=True)}
    if ahead:
        times[ahead] = _of_ahead(even_run(config), layers[main[-1]], layers[ahead], kinds, device)
    last = next(layer for layer, _ in reversed(layer_runs(config)) if layer in main)
    return TimeCosts(
        layers=times,
        head=found[0].head,
        tail=found[main.index(last)].tail,
        point_to_point=max(costs.point_to_point for costs in found),
        step_of_end=found[0].step_of_end,
        uncounted=tuple(sorted({name for costs in found for name in costs.uncounted})),
    )


def _of_layer(
    config: RunConfig, name: str, layer: LayerKind, kinds: Mapping[str, RecomputeKind], device: Device
) -> TimeCosts:
    """The times of two stages that hold nothing but such layers."""
    together, apart = _two_stages(kinds)
    runs = {place: _one_each(layer, kinds, names) for place, names in ((FIRST, together), (LAST, apart))}
    first = _StageTimes(_small_stage(config, runs[FIRST], FIRST), together, device)
    last = _StageTimes(_small_stage(config, runs[LAST], LAST), apart, device)
    forward, backward = first.forward_of_layer, first.backward_of_layer
    step = max(0.0, (first.step - last.step) / (len(together) - len(apart)))
    again = {how: (first if how in together else last).again(how) for how in kinds}
    return TimeCosts(
        layers={name: LayerTimes(forward, backward, again, step)},
        head=(max(0.0, first.forward - len(together) * forward), max(0.0, first.backward - len(together) * backward)),
        tail=(max(0.0, last.forward - len(apart) * forward), max(0.0, last.backward - len(apart) * backward)),
        point_to_point=transfer_time(first.sent, mesh_of(config).stage_device_num, device),
        step_of_end=max(0.0, first.step - len(together) * step),
        uncounted=tuple(sorted({*first.uncounted, *last.uncounted})),
    )


def _of_ahead(
    config: RunConfig, decoder: LayerKind, ahead: LayerKind, kinds: Mapping[str, RecomputeKind], device: Device
) -> LayerTimes:
    """The times of a layer that predicts ahead, from two last stages with more and with fewer of them behind a ``decoder``."""
    together, apart = _two_stages(kinds)
    before = (Run(0, recomputed(decoder, kinds[ALL_RECOMPUTED]), 1),)  # the most recomputed layer comes first
    many, few = (
        _StageTimes(_small_stage(config, before + _one_each(ahead, kinds, names), LAST), (BEFORE, *names), device)
        for names in (together, apart)
    )
    more = len(together) - len(apart)
    return LayerTimes(
        forward=max(0.0, (many.forward - few.forward) / more),
        backward=max(0.0, (many.backward - few.backward) / more),
        again={name: (many if name in together else few).again(name) for name in kinds},
        step=max(0.0, (many.step - few.step) / more),
    )


def _two_stages(kinds: Mapping[str, RecomputeKind]) -> tuple[list[str], list[str]]:
    """The recompute kinds of a stage's layers, and those of another stage with fewer layers."""
    together, *others = chains(dict(kinds))
    apart = [name for row in others for name in row] or [NOTHING_RECOMPUTED]
    return ([*together, NOTHING_RECOMPUTED] if len(together) == len(apart) else together), apart


def _one_each(layer: LayerKind, kinds: Mapping[str, RecomputeKind], names: Sequence[str]) -> tuple[Run, ...]:
    return tuple(Run(0, recomputed(layer, kinds[name]), 1) for name in names)


def _small_stage(config: RunConfig, runs: tuple[Run, ...], place: str) -> CompiledGraph:
    """The graph of a stage that holds these layers, in a pipeline of two; kept like the simulations.

    Of ranks that share a sequence it is the last one's, which has the most of the causal triangle: the others wait for it.
    """
    like = Stage(0 if place == FIRST else 1, 0, place, runs, 2)
    small, first = reduce_to_stage(config, like, Point((1,) * len(runs), 2, 2))
    return kept_graph(small, mesh_of(small).ranks_along(CONTEXT, first)[-1])


class _StageTimes:
    """Sums over the operators of a small stage; ``names`` are the recompute kinds of its layers."""

    def __init__(self, graph: CompiledGraph, names: Sequence[str], device: Device) -> None:
        self.names, self.uncounted = names, uncounted(graph)
        self.sums: defaultdict[tuple[str, bool, int | None], float] = defaultdict(
            float
        )  # by role, computed again, layer
        self.step = self.sent = 0.0
        layers = sorted({number for function in graph.functions for number in _layers(function).values()})
        for function in graph.functions:
            times = {node.name: operator_time(graph, node, device) for node in function.nodes}
            if function.role not in (FORWARD, BACKWARD):
                self.step += sum(times[node.name] for node in function.nodes if node.op not in BETWEEN_STAGES)
                self.sent = max([self.sent, *(bytes_of(node.tensors) for node in function.nodes if node.op == "Send")])
                continue
            number = _layers(function)
            for node in function.nodes:
                layer = layers.index(number[node.name]) if node.name in number else None
                again = function.role == BACKWARD and not node.backward and layer is not None
                self.sums[function.role, again, layer] += times[node.name]

    @property
    def forward(self) -> float:
        return sum(time for (role, _, _), time in self.sums.items() if role == FORWARD)

    @property
    def backward(self) -> float:
        """Without what is computed again."""
        return sum(time for (role, again, _), time in self.sums.items() if role == BACKWARD and not again)

    @property
    def forward_of_layer(self) -> float:
        return self._of_layers(FORWARD)

    @property
    def backward_of_layer(self) -> float:
        return self._of_layers(BACKWARD)

    def _of_layers(self, wanted: str) -> float:
        inside = (
            time
            for (role, again, layer), time in self.sums.items()
            if role == wanted and not again and layer is not None
        )
        return sum(inside) / len(self.names)

    def again(self, name: str) -> float:
        """What the layer of kind ``name`` computes again beyond what one of kind ``none`` does."""
        layer = self.names.index(name)
        kept = self.names.index(NOTHING_RECOMPUTED) if NOTHING_RECOMPUTED in self.names else None
        common = self.sums[BACKWARD, True, kept] if kept is not None else 0.0
        return max(0.0, self.sums[BACKWARD, True, layer] - common)


def _layers(function: Function) -> dict[str, int]:
    """The layer of every operator that has one, by node name; an exchange between cells has that of what reads it."""
    own = {node.name: int(found[1]) for node in function.nodes if (found := LAYER.search(node.scope))}
    readers: defaultdict[str, list[Node]] = defaultdict(list)
    for node in function.nodes:
        for name in node.inputs:
            readers[name].append(node)
    for node in function.nodes:
        if node.op in COLLECTIVES and node.name not in own:
            alike = [reader for reader in readers[node.name] if reader.backward == node.backward]
            numbers = [own[reader.name] for reader in alike or readers[node.name] if reader.name in own]
            if numbers:
                own[node.name] = max(numbers, key=numbers.count)
    return own
