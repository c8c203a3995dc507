"""Graphs that predict from integer codes on Ascend: which operator multiplies what, its parts on two devices, what it costs."""

from pathlib import Path

import predicting_worker as worker
import pytest
from simulations import needs_compiler

from mindllm.compiled.device.front_end import environment
from mindllm.compiled.device.stand_in import device_software
from mindllm.compiled.graph.cost import cost, uncounted
from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.compiled.graph.operators import Operators
from mindllm.compiled.simulation.memory_tracker import read_tracked
from mindllm.compiled.simulation.simulate_rank import ENVIRONMENT
from mindllm.jobs.pool import Task, run_task
from mindllm.timing.costs.of_graph import operator_time
from mindllm.timing.device import read_device

OPERATOR, HALF = "WeightQuantBatchMatmul", 2
HERE = str(Path(__file__).parent)
SHAPES = {
    "attention.wq": (worker.HIDDEN, worker.HIDDEN),
    "attention.wk": (worker.HIDDEN, worker.KEYS),
    "attention.wv": (worker.HIDDEN, worker.KEYS),
    "attention.wo": (worker.HIDDEN, worker.HIDDEN),
    "feed_forward.w1": (worker.HIDDEN, worker.WIDTH),
    "feed_forward.w2": (worker.WIDTH, worker.HIDDEN),
}
"""Inputs and outputs of the projections in codes."""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("predicting")
    variables = {"GLOG_v": "3", "PYTHONPATH": HERE, **environment(0, 2)}
    task = Task("compiling", "predicting_worker:compile_all", (str(directory),), directory=directory, timeout=300)
    outcome = run_task(task, environment=variables)
    assert outcome.code == 0, outcome.log.read_text()
    return lambda name: parse_mind_ir((directory / name).read_bytes(), 0)


def operands(graph, node):
    """Name, shape and dtype of each tensor but the first that an operator is given."""
    found = zip(node.inputs[1:], graph.input_tensors(node)[1:], strict=False)
    return [(Operators(graph).parameter(name), tensor.shape, tensor.dtype) for name, tensor in found]


@pytest.mark.parametrize("code", ["uint4", "uint8", "int8"])
def test_every_projection_in_codes_is_one_operator_and_no_look_up(graphs, code):
    graph = graphs(code)
    held, packed = ("int4", 2) if code == "uint4" else ("int8", 1)
    group = worker.KINDS[code]["group_size"]
    wanted = []
    for layer in range(worker.MODEL["num_layers"]):
        for module, (width, out) in SHAPES.items():
            path, groups = f"model.layers.{layer}.{module}", width // group if group else 1
            given = [(f"{path}.codes", (width, out // packed), held), (f"{path}.scales", (groups, out), "bfloat16")]
            given += [(f"{path}.offsets", (groups, out), "bfloat16")] if group else []
            wanted.append(given)
    nodes = graph.find(OPERATOR)
    assert sorted(operands(graph, node) for node in nodes) == sorted(wanted)
    for node in nodes:
        assert [graph.constants[name] for name in node.inputs[-3:]] == [False, False, group]  # no transposes
    assert len(graph.find("MatMul")) == worker.MODEL["num_layers"] + 1  # what is held in floats, and the head
    assert not [node for node in graph.nodes() if ".held" in node.path]
    tables = [tensor.shape for node in graph.find("Gather") for tensor in graph.input_tensors(node)[:1]]
    assert (256, 2) not in tables
    assert (256, 1) not in tables


def test_columns_in_an_order_of_their_own_are_gathered_from_the_input(graphs):
    graph = graphs("uint4")
    gathers = [node for node in graph.find("Gather") if ".layers." in node.path]
    parameters = sorted(Operators(graph).parameter(node.inputs[1]) for node in gathers)
    paths = (f"model.layers.{layer}.{module}" for layer in range(worker.MODEL["num_layers"]) for module in SHAPES)
    assert parameters == sorted(f"{path}.columns" for path in paths)
    made = {node.name: node for node in graph.nodes()}
    assert all(made[node.inputs[0]].op == "Gather" for node in graph.find(OPERATOR))


def test_tables_keep_the_look_up(graphs):
    graph = graphs("nf4")
    assert not graph.find(OPERATOR)
    looked_up = [node for node in graph.find("Gather") if node.path.endswith(".held")]
    assert len(looked_up) == worker.MODEL["num_layers"] * len(SHAPES)


def test_two_devices_have_parts_of_rows_and_of_groups_of_columns(graphs):
    graph = graphs("split")
    found = {}
    for node in graph.find(OPERATOR):
        (name, *codes), (_, *scales), (_, *offsets) = operands(graph, node)
        assert scales == offsets
        found[name.removeprefix("model.layers.0.").removesuffix(".codes")] = (codes[0], scales[0], node.shapes[0])
    hidden, width, rows, group = worker.HIDDEN, worker.WIDTH, worker.ROWS, worker.GROUP
    assert found == {
        "attention.wq": ((hidden, hidden // 2 // 2), (hidden // group, hidden // 2), (rows, hidden // 2)),
        "feed_forward.w1": ((hidden, width // 2 // 2), (hidden // group, width // 2), (rows, width // 2)),
        "attention.wo": ((hidden // 2, hidden // 2), (hidden // 2 // group, hidden), (rows, hidden)),
        "feed_forward.w2": ((width // 2, hidden // 2), (width // 2 // group, hidden), (rows, hidden)),
    }
    summed = {made.path for node in graph.find("AllReduce") for made in Operators(graph).producers(node)}
    assert summed == {"wo", "w2"}


def test_its_work_bytes_and_time_are_counted(graphs):
    graph = graphs("uint4")
    assert OPERATOR not in uncounted(graph)
    (node,) = graph.find(OPERATOR, lambda node: operands(graph, node)[0][0].endswith("0.feed_forward.w2.codes"))
    rows, width, out, groups = worker.BATCH * worker.PROMPT, worker.WIDTH, worker.HIDDEN, worker.WIDTH // worker.GROUP
    found = cost(graph, node)
    assert found.products == found.flops == 2 * rows * width * out
    assert found.bytes == HALF * rows * (width + out) + width * out // 2 + 2 * HALF * groups * out
    assert operator_time(graph, node, read_device("atlas_800t_a2")) > 0


@needs_compiler
def test_the_back_end_of_ascend_has_its_kernel_and_makes_no_matrix(tmp_path):
    """MindSpore's dry run of a token: every product is a task, and nothing is as large as a matrix but what is held in floats."""
    variables = {**ENVIRONMENT, **device_software(), "RANK_ID": "0", "RANK_SIZE": "1"}
    search = {"PYTHONPATH": HERE}
    task = Task("simulating", "predicting_worker:simulate", ("uint4", str(tmp_path)), directory=tmp_path, timeout=300)
    outcome = run_task(task, environment={**variables, **search})
    assert outcome.code == 0, outcome.log.read_text()
    tracked = read_tracked(tmp_path / "rank_0", str)
    blocks = [block for block in tracked.blocks if f"/{OPERATOR}-op" in block.node]
    assert len(blocks) == worker.MODEL["num_layers"] * len(SHAPES)
    assert not [block for block in tracked.blocks if "-DequantizedWeight/" in block.node]
    codes = [block for block in tracked.blocks if block.node.endswith("feed_forward.w1.codes")]
    assert {block.kind for block in codes} == {"Weight"}
    packed = worker.HIDDEN * worker.WIDTH // 2
    assert all(packed <= block.size < 2 * packed for block in codes)
