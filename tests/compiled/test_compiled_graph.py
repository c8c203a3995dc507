"""The typed view of a compiled rank: everything a node needs is found, types agree, files come back or are refused."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindllm.compiled.graph import mind_ir
from mindllm.compiled.graph.compiled_graph import ClosureType, OtherType, TupleType
from mindllm.compiled.graph.file import FACTS, INITIAL, MIND_IR, VERSION, load, save
from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.compiled.graph.schedule import micro_batch_schedule
from mindllm.errors import UserError
from mindllm.parallel.parameter_layout import ParameterLayout

ALL, INTERLEAVED, SLICED, DEVICE = "all", "interleaved first", "dp2 tp2", "one device"
WEIGHT = "model.layers.1.attention.wq.weight"


@pytest.mark.compiles(ALL, INTERLEAVED, SLICED, DEVICE)
def test_every_name_a_node_uses_is_defined(compiled):
    for name in (ALL, INTERLEAVED, SLICED, DEVICE):
        graph = compiled(name)
        shared = set(graph.constants) | {function.name for function in graph.functions}
        for function in graph.functions:
            known = shared | {value.name for value in function.inputs}
            if function is graph.step:
                known |= {parameter.node for parameter in graph.parameters.values()}
            for node in function.nodes:
                assert known.issuperset(node.inputs), node
                assert not node.callee or node.callee in known
                known.add(node.name)
            assert function.output in known


@pytest.mark.compiles(ALL, DEVICE)
def test_a_call_gives_each_input_of_the_function_its_type(compiled):
    for name in (ALL, DEVICE):
        graph = compiled(name)
        types = {node.name: node.type for node in graph.nodes()}
        types |= {value.name: value.type for value in graph.step.inputs}
        calls = [n for n in graph.step.nodes if n.op == "Call" and graph.is_function(n.callee)]
        partials = [n for n in graph.find("Partial") if graph.is_function(n.inputs[0])]
        assert partials
        for target, given in [(n.callee, n.inputs) for n in calls] + [(n.inputs[0], n.inputs[1:]) for n in partials]:
            function = graph.function(target)
            for value, source in zip(function.inputs, given, strict=False):
                known = types.get(source)
                if known is not None and not isinstance(known, OtherType):
                    assert getattr(value.type, "shape", None) == getattr(known, "shape", None)
                    assert getattr(value.type, "dtype", None) == getattr(known, "dtype", None)
        for node in calls:
            assert len(node.inputs) == len(graph.function(node.callee).inputs)


@pytest.mark.compiles(ALL)
def test_the_fast_parser_reads_what_the_slow_one_reads(compiled, monkeypatch):
    graph = compiled(ALL)
    fast = parse_mind_ir(graph.mind_ir, graph.rank)
    parser = mind_ir._model_proto()
    assert parser is not mind_ir._protobuf().ModelProto  # this protobuf has the parser in C
    monkeypatch.setattr(mind_ir, "_model_proto", lambda: mind_ir._protobuf().ModelProto)
    assert repr(parse_mind_ir(graph.mind_ir, graph.rank)) == repr(fast)


@pytest.mark.compiles(ALL)
def test_types_of_tensors_tuples_and_closures(compiled):
    graph = compiled(ALL)
    scores = graph.find("FlashAttentionScore")[0]
    assert scores.dtypes == (
        "float32",
        "float32",
        "float16",
        "float16",
    )  # softmax maximum and sum, (empty) softmax, output
    forward = next(node for node in graph.step.nodes if node.op == "Call")
    assert isinstance(forward.type, TupleType)
    assert isinstance(forward.type.items[-1], ClosureType)
    assert {node.dtypes for node in graph.find("AssignAdd")} == {("float32",)}
    assert graph.find("AssignAdd")[0].tensors[0].parameter.startswith("accu_grads.")
    product = graph.find("MatMul", lambda n: n.path.endswith("1.attention.wq"))[0]
    assert product.input_strategy == ((2, 1), (2, 1))
    assert product.dtypes == ("float16",)


@pytest.mark.compiles(ALL)
def test_constants_have_their_values(compiled):
    graph = compiled(ALL)
    cast = next(node for node in graph.step.nodes if node.op == "Cast")
    assert isinstance(graph.constants[cast.inputs[1]], int)
    arrays = [value for value in graph.constants.values() if isinstance(value, np.ndarray)]
    assert arrays
    assert not arrays[0].flags.writeable
    assert OtherType("UMONAD") in graph.constants.values()
    permutation = graph.find("Transpose")[0]
    assert graph.constants[permutation.inputs[1]] == (0, 2, 1, 3)


@pytest.mark.compiles(ALL, SLICED, DEVICE)
def test_layouts_say_which_part_a_rank_keeps(compiled):
    for name, own in ((ALL, slice(32, 48)), (SLICED, slice(48, 64))):  # tensor parallel cuts rows, then the optimizer
        graph = compiled(name)
        parameter = graph.parameters[WEIGHT]
        assert parameter.dtype == "float32"
        assert parameter.layout.full_shape == (64, 64)
        assert parameter.layout.slice_shape == (32, 64)
        assert parameter.layout.optimizer_ranks == graph.groups[parameter.layout.optimizer_group]
        rows, columns = parameter.layout.slices(graph.rank)
        assert columns == slice(0, 64)
        assert rows.stop - rows.start == parameter.shape[0] == 16
        tensor_parallel_index = graph.rank % 2
        assert rows.start // 32 == tensor_parallel_index
        if name == SLICED:
            assert rows == own
    assert compiled(DEVICE).parameters[WEIGHT].layout is None


def test_parts_of_all_ranks_make_the_whole():
    whole = np.arange(64).reshape(16, 4)
    layout = ParameterLayout((2, 2), (0, -1), (16, 4), (8, 4), "group")
    for group in ((0, 2), (1, 3)):
        parts = [whole[replace(layout, optimizer_ranks=group).slices(rank)] for rank in group]
        index = group[0] % 2
        assert np.array_equal(np.concatenate(parts), whole[8 * index : 8 * index + 8])
    columns = ParameterLayout((2, 2), (-1, 0), (16, 4), (16, 2))
    assert columns.slices(1) == (slice(0, 16), slice(2, 4))
    assert columns.slices(2) == (slice(0, 16), slice(0, 2))
    grid = ParameterLayout((2, 4), (1, 0), (16, 4), (8, 1))
    assert grid.slices(8 + 6) == (slice(8, 16), slice(2, 3))  # the second stage repeats the places of the first


@pytest.mark.compiles(ALL, INTERLEAVED)
def test_forward_and_backward_functions_are_found(compiled):
    graph = compiled(ALL)
    assert [function.role for function in graph.functions] == ["step", "else", "then", "forward", "backward"]
    assert {graph.function(name).cell.split("_")[-2] for name in graph.backward_of} == {"ReusedNetwork"}
    assert len(compiled(INTERLEAVED).backward_of) == 2  # one per chunk


@pytest.mark.compiles("pp2 first", "pp2 last", INTERLEAVED)
def test_the_schedule_is_one_forward_one_backward(compiled):
    def computed(name):
        return [(e.kind[0], e.micro_batch) for e in micro_batch_schedule(compiled(name)) if e.peer is None]

    assert computed("pp2 first") == [(k, m) for k, m in zip("ffbfbfbb", [0, 1, 0, 2, 1, 3, 2, 3], strict=True)]
    assert computed("pp2 last") == [(k, m) for m in range(4) for k in "fb"]
    schedule = micro_batch_schedule(compiled(INTERLEAVED))
    for kind in ("forward", "backward"):
        assert {(e.micro_batch, e.chunk) for e in schedule if e.kind == kind} == {
            (m, c) for m in range(4) for c in (0, 1)
        }
    assert {event.peer for event in schedule if event.kind in ("send", "receive")} == {1}


@pytest.mark.compiles(ALL, DEVICE)
def test_operators_know_their_source_lines(compiled):
    def innermost(name, op, where):
        graph = compiled(name)
        return {Path(str(graph.source(node)[-1]).split(":")[0]).name for node in graph.find(op, where)}

    for name in (ALL, DEVICE):
        assert innermost(name, "MatMul", lambda n: not n.backward and n.path.endswith(".wq")) == {"linear.py"}
        assert innermost(name, "FlashAttentionScoreGrad", lambda n: True) == {"flash_attention.py"}
    assert innermost(ALL, "ReduceScatter", lambda n: n.path.endswith("1.attention.wo")) == {
        "linear.py"
    }  # the compiler's
    product = compiled(ALL).find("MatMul", lambda n: n.path.endswith("1.attention.wq"))[0]
    line = compiled(ALL).source(product)[-1]
    assert line.text == Path(line.file).read_text(encoding="utf-8").splitlines()[line.line - 1].strip()
    assert {Path(line.file).name for line in compiled(ALL).source(product)} >= {
        "decoder.py",
        "decoder_layer.py",
        "attention.py",
    }


@pytest.mark.compiles(ALL)
def test_a_graph_comes_back_from_its_file(compiled, tmp_path):
    path = tmp_path / "rank.graph"
    save(compiled(ALL), path)
    again = load(path)
    assert again.parameters == compiled(ALL).parameters
    assert again.groups == compiled(ALL).groups
    assert again.sources == compiled(ALL).sources
    assert [node.name for node in again.nodes()] == [node.name for node in compiled(ALL).nodes()]
    assert [node.type for node in again.nodes()] == [node.type for node in compiled(ALL).nodes()]
    script = "import sys; from mindllm.compiled.graph.file import load; load(sys.argv[1]); assert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)  # reading needs no MindSpore


@pytest.mark.compiles(ALL)
def test_damaged_and_foreign_files_are_refused(compiled, tmp_path):
    path = tmp_path / "rank.graph"
    save(compiled(ALL), path)
    whole = path.read_bytes()
    for number, damaged in enumerate((whole[:-40], whole[:200], b"", b"PK garbage", flipped(whole, len(whole) // 2))):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"rank\.graph: ") as error:
            load(path)
        assert error.value.exit_code == 2, number
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "absent.graph")
    for facts, reason in (
        ({"format": "other"}, "not a compiled graph"),
        ({"format": "mindllm compiled graph", "version": 99}, "has version 99"),
        ({"format": "mindllm compiled graph", "version": VERSION}, "not a compiled graph of this version"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(FACTS, json.dumps(facts))
            archive.writestr(MIND_IR, b"")
            archive.writestr(INITIAL, b"PK\x05\x06" + bytes(18))
        with pytest.raises(UserError, match=reason):
            load(path)


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def test_what_is_not_mind_ir_is_refused():
    for data in (b"", b"\xff\xfe not protobuf", b"\x08\x01"):
        with pytest.raises(UserError, match="not MindIR"):
            parse_mind_ir(data, 0)
