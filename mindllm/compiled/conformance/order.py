"""Whether edges of the graph order what must be in order: writes of a parameter and its other uses, and passes of a pipeline.

Ranks are executed in one valid order of their nodes, a device may take another. Two uses of a parameter of which one writes it,
and between which there is no edge, are a race that no number tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from mindllm.architecture.optimizer_state import FIRST_MOMENTS, updated_weights
from mindllm.compiled.conformance.expected import parts_in_flight
from mindllm.compiled.conformance.finding import Finding, Mistake, together
from mindllm.compiled.execute.state import ACCUMULATORS
from mindllm.compiled.graph.compiled_graph import CALL, CONSTANT, CompiledGraph, Node
from mindllm.compiled.graph.operators import Operators
from mindllm.compiled.graph.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Event, micro_batch_schedule
from mindllm.config import RunConfig

ASSIGNMENTS = frozenset({"Assign", "AssignAdd", "AssignSub", "AdamWeightDecay"})
COUNT, ENDS = "grad_accu_num", ("forward_end", "pipeline_end")
"""Attributes the compiler reads."""
COMMUTES = "AssignAdd"
"""Two of them may come in any order."""
PASSED_ON = frozenset({"Depend", "Load", "TensorMove"})
"""Operators whose first input goes on as it is."""
JOINED = frozenset({"MakeTuple", "Partial", "Switch", "TupleGetItem"})
"""Operators whose inputs all go on, some of them as what a closure will be called with."""


def order(config: RunConfig, ranks: Sequence[Operators]) -> Finding:
    """Write of weights and accumulators have an edge to or from each other use; parts and passes are in their order."""
    mistakes = [
        Mistake(rank.graph.rank, text)
        for rank in ranks
        for text in (*_races(rank.graph), *_parts(config, rank), *_passes(config, rank))
    ]
    found = f"{len(mistakes)} that nothing orders" if mistakes else "all that must be"
    return Finding("order", "writes, parts, passes", found, together(mistakes))


def _races(graph: CompiledGraph) -> Iterator[str]:
    """Weights and accumulators with a write and another use that no edge orders."""
    uses = _Uses(graph)
    names = [name for name in graph.parameters if name.startswith(ACCUMULATORS)]
    names += [name for name in updated_weights(graph.parameters) if name in graph.parameters]
    read = {name: uses.of(graph.parameters[name].node) for name in names}
    written = {name: _writers(name, graph, uses, read[name]) for name in names}
    before = _ancestors(graph, {node.name for nodes in read.values() for node in nodes})
    for name in names:
        unordered = {
            (_where(write), _where(other))
            for write in written[name]
            for other in read[name]
            if other.name != write.name
            and not (other.op == write.op == COMMUTES)
            and not before.knows(other.name, write.name)
            and not before.knows(write.name, other.name)
        }
        for write, other in sorted(unordered)[:1]:
            yield f"{name} is written by {write} and used by {other}, whichever comes first"


def _where(node: Node) -> str:
    return "the update" if node.op == CALL else f"{node.op} at {node.scope}"


def _writers(name: str, graph: CompiledGraph, uses: _Uses, read: Sequence[Node]) -> list[Node]:
    """Return the nodes that write a parameter in the step: assignments, and the call that changes a weight's moments."""
    node = graph.parameters[name].node
    found = [use for use in read if use.op in ASSIGNMENTS and use.inputs[0] == node]
    for moment in (
        graph.parameters[key] for key in (f"{one}{name}" for one in FIRST_MOMENTS) if key in graph.parameters
    ):
        updates = {use.name for use in uses.of(moment.node) if use.op == CALL}
        found += [use for use in read if use.name in updates]
    return found


class _Uses:
    """The nodes of the step that use a value, past those that only pass it on."""

    def __init__(self, graph: CompiledGraph) -> None:
        self.users: dict[str, list[Node]] = defaultdict(list)
        for node in graph.step.nodes:
            if node.op != CONSTANT:
                for name in dict.fromkeys((*node.inputs, node.callee)):
                    self.users[name].append(node)

    def of(self, name: str) -> list[Node]:
        """Use of the value with this name."""
        waiting, found = [name], {}
        for current in waiting:
            for user in self.users.get(current, ()):
                passes = user.op in JOINED or (user.op in PASSED_ON and user.inputs[0] == current)
                if passes and user.name not in waiting:
                    waiting.append(user.name)
                elif not passes and user.op not in (*PASSED_ON, "UpdateState"):
                    found[user.name] = user
        return list(found.values())


class _Ancestors:
    """Which of some nodes come before a node by edges: a bit for each of them."""

    def __init__(self, bits: Mapping[str, int], behind: Mapping[str, int]) -> None:
        self.bits, self.behind = bits, behind

    def knows(self, first: str, second: str) -> bool:
        """Return True if edges lead from ``first`` to ``second``."""
        return bool(self.behind[second] & self.bits[first])


def _ancestors(graph: CompiledGraph, names: set[str]) -> _Ancestors:
    bits = {name: 1 << index for index, name in enumerate(sorted(names))}
    behind: dict[str, int] = {}
    for node in graph.step.nodes:
        found = 0
        for name in (*node.inputs, node.callee):
            found |= behind.get(name, 0) | bits.get(name, 0)
        behind[node.name] = found
    return _Ancestors(bits, behind)


def _parts(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Yield wrong numbers or ends of the parts of a batch, by which the compiler orders their passes."""
    sizes = config.parallel_config
    parts = sizes.micro_batch_num * config.runner_config.gradient_accumulation_steps
    if parts == 1:
        return
    counts = {node.attributes[COUNT] for node in rank.nodes if COUNT in node.attributes}
    if sizes.pipeline_stage == 1 and counts != {parts}:
        yield f"the compiler is told of {_text(counts)} parts of a batch, not of {parts}"
    ends = sorted(node.attributes[mark] for node in rank.nodes for mark in ENDS if mark in node.attributes)
    back = config.parallel.pipeline_config.pipeline_scheduler == "zero_bubble_v"
    with_loss = 0 if back else sizes.pipeline_stage - 1
    if rank.graph.rank // sizes.stage_device_num == with_loss and ends != list(range(1, parts)):
        yield f"the parts that are added to the first one end as {_text(ends)}, not as {_text(range(1, parts))}"


def _passes(config: RunConfig, rank: Operators) -> Iterator[str]:
    """Yield passes of a pipeline without an edge to the next one, and a wrong number of passes in flight."""
    sizes = config.parallel_config
    events = [event for event in micro_batch_schedule(rank.graph) if event.peer is None]
    if sizes.pipeline_stage == 1 or not events:
        return
    before = _ancestors(rank.graph, {event.node.name for event in events})
    for event, following in pairwise(events):
        if not before.knows(event.node.name, following.node.name):
            yield f"nothing orders the {_pass(event)} and the {_pass(following)}"
            return
    backward = {BACKWARD: BACKWARD, INPUT: BACKWARD}
    apart = {
        kind: {(event.chunk, event.micro_batch) for event in events if event.kind == kind} for kind in (INPUT, WEIGHT)
    }
    if apart[INPUT] != apart[WEIGHT]:
        missing = len(apart[INPUT] ^ apart[WEIGHT])
        yield f"{missing} passes have the gradients of inputs alone, or those of weights"
    passes = [event for event in events if event.kind != WEIGHT]
    done = [(backward.get(event.kind, event.kind), event.chunk, event.micro_batch) for event in passes]
    chunks = config.model.config.pp_interleave_num
    expected = [
        (kind, chunk, part)
        for kind in (FORWARD, BACKWARD)
        for chunk in range(chunks)
        for part in range(sizes.micro_batch_num * sizes.seq_split_num)
    ]
    if sorted(done) != sorted(expected):
        yield f"there are {len(done)} passes, not {len(expected)}"
    waiting = max(accumulate(1 if event.kind == FORWARD else -1 for event in passes))
    most = parts_in_flight(config, rank.graph.rank // sizes.stage_device_num)
    if waiting != most:
        yield f"{waiting} parts of a batch wait for their backward pass at a time, not {most}"


def _pass(event: Event) -> str:
    return f"{event.kind} pass of part {event.micro_batch} in chunk {event.chunk}"


def _text(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
