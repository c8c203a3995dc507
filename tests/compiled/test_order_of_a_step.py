"""Orders that no number tells: uses of a parameter that is written, parts of a batch, passes of a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_cluster import cluster_run
from test_asked_for import asked, changed, violated

from mindllm.compiled.conformance.expected import parts_in_flight
from mindllm.compiled.graph.compiled_graph import CALL, CompiledGraph, Node
from mindllm.compiled.graph.schedule import BACKWARD, FORWARD, WEIGHT, micro_batch_schedule

ALL = "all"  # the last of two stages, two micro-batches
ACCUMULATING = "dp2 accumulating"
NORM = "accu_grads.model.norm_out.weight"


def rewired(graph: CompiledGraph, where, inputs) -> CompiledGraph:
    """A graph in which the nodes that ``where`` is true of have other inputs."""
    assert any(map(where, graph.nodes()))
    functions = tuple(
        replace(one, nodes=tuple(replace(node, inputs=inputs(node)) if where(node) else node for node in one.nodes))
        for one in graph.functions
    )
    return replace(graph, functions=functions)


@pytest.mark.compiles(ALL, ACCUMULATING, "tied last")
@pytest.mark.parametrize("name", [ALL, ACCUMULATING, "tied last"])
def test_what_is_compiled_is_in_order(compiled, name):
    assert "order" not in violated(asked(compiled(name), name))


def cleared_at_once(graph: CompiledGraph, name: str) -> CompiledGraph:
    """A graph that clears one accumulator whenever it likes."""
    accumulator = graph.parameters[name].node
    clear = next(node for node in graph.step.nodes if node.op == "Assign" and node.inputs[0] == accumulator)
    by_name = {node.name: node for node in graph.step.nodes}
    zeros = by_name[clear.inputs[1]]
    assert zeros.op == "ZerosLikeExt"
    free = rewired(graph, lambda node: node.name == zeros.name, lambda node: (accumulator, *node.inputs[1:]))
    return rewired(free, lambda node: node.name == clear.name, lambda node: node.inputs[:2])


@pytest.mark.compiles(ALL, ACCUMULATING)
@pytest.mark.parametrize("name", [ALL, ACCUMULATING])
def test_an_accumulator_that_is_cleared_without_waiting_for_the_update(compiled, name):
    graph = cleared_at_once(compiled(name), NORM)
    (problem,) = violated(asked(graph, name))["order"]
    assert problem.startswith(f"rank {graph.rank}: {NORM} is written by Assign at ")
    assert problem.endswith(", whichever comes first")


@pytest.mark.compiles(ACCUMULATING)
def test_another_number_of_parts_than_the_compiler_is_told(compiled):
    graph = compiled(ACCUMULATING)
    cut = next(node for node in graph.nodes() if "grad_accu_num" in node.attributes)
    told = changed(
        graph, lambda node: "grad_accu_num" in node.attributes, attributes={**cut.attributes, "grad_accu_num": 1}
    )
    problem = "rank 0: the compiler is told of 1 parts of a batch, not of 2"
    assert violated(asked(told, ACCUMULATING)) == {"order": (problem,)}


@pytest.mark.compiles(ALL)
def test_parts_that_all_end_as_the_first_one(compiled):
    graph = compiled(ALL)
    end = next(node for node in graph.nodes() if "pipeline_end" in node.attributes)
    marked = changed(graph, lambda node: node == end, attributes={**end.attributes, "pipeline_end": 0})
    problem = "rank 6: the parts that are added to the first one end as 0, not as 1"
    assert violated(asked(marked, ALL)) == {"order": (problem,)}


def calls(graph: CompiledGraph) -> list[Node]:
    """Calls of the network and of its gradients, in the order of the step."""
    return [node for node in graph.step.nodes if node.op == CALL and "micro" in node.primal]


@pytest.mark.compiles(ALL)
def test_passes_that_nothing_orders(compiled):
    graph = compiled(ALL)
    first = calls(graph)[0]
    reaches = {first.name}
    for node in graph.step.nodes:  # all that the first pass yields, but not what it is called by
        if reaches & {*node.inputs, node.callee}:
            reaches.add(node.name)
    loose = rewired(
        graph,
        lambda node: node.op == "Depend" and node.inputs[1] in reaches,
        lambda node: (node.inputs[0], node.inputs[0]),
    )
    problems = violated(asked(loose, ALL))["order"]
    assert any(problem.startswith("rank 6: nothing orders the ") for problem in problems)


@pytest.mark.compiles(ALL)
def test_more_parts_that_wait_than_the_schedule_has(compiled):
    """GPipe was asked for, and the graph has 1F1B: the last stage does each backward pass at once."""
    gpipe = {"pipeline_config": {"pipeline_scheduler": "gpipe", "pipeline_interleave": True}}
    found = violated(asked(compiled(ALL), ALL, parallel={**gpipe, "enable_parallel_optimizer": True}))
    assert found["order"] == ("rank 6: 1 parts of a batch wait for their backward pass at a time, not 2",)


INTERLEAVED = "interleaved first"


def held_longer(graph: CompiledGraph) -> CompiledGraph:
    """A graph that does its first backward pass behind the next two passes, each of which waits for the one before."""
    events = [one.node.name for one in micro_batch_schedule(graph) if one.kind in (FORWARD, BACKWARD)]
    kinds = [one.kind for one in micro_batch_schedule(graph) if one.kind in (FORWARD, BACKWARD)]
    first = kinds.index(BACKWARD)
    late, between = events[first], events[first + 1]
    assert kinds[first + 1] == FORWARD
    by_name = {node.name: node for node in graph.step.nodes}
    held = replace(by_name[late], inputs=(*by_name[late].inputs, between))
    early = replace(by_name[between], inputs=tuple(name for name in by_name[between].inputs if name != late))
    early = replace(early, inputs=(*early.inputs, events[first - 1]))
    after = replace(by_name[events[first + 2]], inputs=(*by_name[events[first + 2]].inputs, late))
    changed = {late: [], between: [early, held], after.name: [after]}
    nodes = tuple(new for node in graph.step.nodes for new in changed.get(node.name, [node]))
    return replace(graph, functions=(replace(graph.step, nodes=nodes), *graph.functions[1:]))


@pytest.mark.compiles(INTERLEAVED)
def test_chunks_that_hold_more_parts_than_their_schedule(compiled):
    graph = compiled(INTERLEAVED)
    assert "order" not in violated(asked(graph, INTERLEAVED))
    problem = "rank 0: 6 parts of a batch wait for their backward pass at a time, not 5"
    assert violated(asked(held_longer(graph), INTERLEAVED))["order"] == (problem,)


@pytest.mark.parametrize(
    ("stages", "chunks", "parts", "waiting"),
    [
        (2, 1, 4, (2, 1)),
        (2, 2, 4, (5, 3)),
        (2, 3, 4, (7, 5)),
        (4, 2, 8, (11, 9, 7, 5)),
        (4, 2, 4, (8, 8, 7, 5)),
        (4, 2, 6, (12, 11, 9, 7)),  # all six are one round
    ],
)
def test_parts_that_wait_as_mindspore_has_them(stages, chunks, parts, waiting):
    """The numbers are those of graphs that MindSpore 2.10 compiled."""
    model = {"num_layers": stages * chunks, "pp_interleave_num": chunks}
    scheduler = {"pipeline_config": {"pipeline_interleave": chunks > 1}}
    config = cluster_run(pp=stages, micro=parts, model=model, parallel=scheduler)
    assert tuple(parts_in_flight(config, stage) for stage in range(stages)) == waiting


@pytest.mark.compiles("v first", "v last")
@pytest.mark.parametrize("case", ["v first", "v last"])
def test_gradients_of_weights_that_are_left_out_of_a_v(compiled, case):
    """The pass that had them later is called whole where only those of its inputs were meant, or the other way round."""
    graph = compiled(case)
    assert not violated(asked(graph, case))
    later = [event.node for event in micro_batch_schedule(graph) if event.kind == WEIGHT]
    late = later[-1].name
    nodes = tuple(node for node in graph.step.nodes if node.name != late)
    spoilt = replace(graph, functions=(replace(graph.step, nodes=nodes), *graph.functions[1:]))
    assert "1 passes have the gradients of inputs alone, or those of weights" in " ".join(
        violated(asked(spoilt, case))["order"]
    )
