"""The order in which a pipeline rank computes and exchanges its micro-batches, read from its compiled graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mindllm.compiled.graph.compiled_graph import CALL, ClosureType, CompiledGraph, Node, TupleType, ValueType

FORWARD, BACKWARD, SEND, RECEIVE = "forward", "backward", "send", "receive"
INPUT, WEIGHT = "input gradient", "weight gradient"
CLOSURES = (BACKWARD, INPUT, WEIGHT)
"""What a forward call returns behind its outputs: the backward pass, and under ``zero_bubble_v`` the same in two parts."""


@dataclass(frozen=True)
class Event:
    """One thing a pipeline rank does in a step.

    Attributes:
        kind: ``forward``, ``backward``, ``input gradient`` and ``weight gradient`` (a backward pass in two parts), ``send`` or
            ``receive``.
        micro_batch: counted from 0.
        chunk: which of the rank's interleaved parts of the model, counted from 0; of an exchange, what the compiler says.
        node: the call or the exchange.
        peer: global rank on the other side of an exchange.
    """

    kind: str
    micro_batch: int
    chunk: int
    node: Node
    peer: int | None = None


def micro_batch_schedule(graph: CompiledGraph) -> tuple[Event, ...]:
    """Call of the network and exchanges with other stages, in the order the compiler prescribes.

    Empty where no function is reused: one micro-batch, or accumulation without a pipeline.
    """
    reader = _ScheduleReader(graph)
    events = (reader.event(node) for node in graph.step.nodes)
    return tuple(event for event in events if event is not None)


class _ScheduleReader:
    """Remembers which micro-batch and chunk each forward call was."""

    def __init__(self, graph: CompiledGraph) -> None:
        self.graph = graph
        self.nodes = {node.name: node for node in graph.step.nodes}
        self.constants = graph.constants
        self.chunks: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.forwards: dict[str, tuple[int, int]] = {}

    def event(self, node: Node) -> Event | None:
        if node.op == CALL:
            return self._forward(node) if self.graph.is_function(node.callee) else self._backward(node)
        if node.op in ("Send", "Receive") and node.micro_batch is not None:
            kind, key = (SEND, "dst_global_rank") if node.op == "Send" else (RECEIVE, "src_global_rank")
            return Event(kind, node.micro_batch, node.primal.get("chunk", 0), node, node.attributes.get(key))
        return None

    def _forward(self, node: Node) -> Event | None:
        if self.graph.function(node.callee).role != FORWARD:
            return None
        chunk = self.chunks.setdefault(node.callee, len(self.chunks))
        micro_batch = self.calls[node.callee]
        self.calls[node.callee] += 1
        self.forwards[node.name] = (micro_batch, chunk)
        return Event(FORWARD, micro_batch, chunk, node)

    def _backward(self, node: Node) -> Event | None:
        """Return the call of a closure that a forward call returned."""
        closure = self.nodes.get(node.callee)
        if closure is None:
            return None
        call = next((name for name in closure.inputs if name in self.forwards), None)
        if call is None:
            return None
        return Event(self._part(closure, self.nodes[call].type), *self.forwards[call], node)

    def _part(self, closure: Node, returned: ValueType) -> str:
        """Return the part of a backward pass that a closure computes, of those that a call has ``returned``."""
        items = returned.items if isinstance(returned, TupleType) else ()
        places = [place for place, item in enumerate(items) if isinstance(item, ClosureType)]
        number = next((value for name in closure.inputs if isinstance(value := self.constants.get(name), int)), None)
        return CLOSURES[places.index(number)] if number in places else BACKWARD
