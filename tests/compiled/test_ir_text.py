"""MindSpore's text graphs: the same as MindIR where both exist, files of 2.7.0, and what is damaged."""

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.compiled.graph.compiled_graph import CONSTANT, TensorType, TupleType
from mindllm.compiled.graph.ir_text import parse_ir_text, parse_type, parse_value, read_ir_text, split
from mindllm.errors import UserError

SAMPLE = Path(__file__).parent / "samples" / "validate_2_7_0.ir"


def told(graph):
    """What is known of every operator, function by function."""
    return {
        function.name: [
            (node.op, node.scope, node.shapes, node.dtypes, node.instance, node.ranks, len(node.inputs))
            for node in function.nodes
            if node.op != CONSTANT
        ]
        for function in graph.functions
    }


def test_the_text_tells_what_mind_ir_tells(compiled_with_text):
    graph, text = compiled_with_text
    read = parse_ir_text(text, graph.rank)
    assert told(read) == told(graph)
    assert read.step.name == graph.step.name
    assert read.executions == graph.executions
    assert read.groups == graph.groups
    assert {(p.name, p.shape, p.dtype) for p in read.parameters.values()} == {
        (p.name, p.shape, p.dtype) for p in graph.parameters.values()
    }
    assert read.sources == graph.sources
    links = [
        Counter(source.op for node in one.nodes() for source in map(producers(one).get, node.inputs) if source)
        for one in (read, graph)
    ]
    assert links[0] - links[1] == links[1] - links[0] == Counter()


def producers(graph):
    return {node.name: node for node in graph.nodes() if node.op != CONSTANT}


def test_micro_batches_run_their_function_as_often(compiled_with_text):
    graph, _ = compiled_with_text
    times = {function.role: graph.executions[function.name] for function in graph.functions}
    assert times["forward"] == times["backward"] == 2
    assert times["step"] == 1


def test_a_file_of_2_7_is_read():
    graph = read_ir_text(SAMPLE)
    product = graph.find("MatMul", lambda node: node.instance == "mm1")[0]
    assert product.path == "net.feed_forward"
    assert product.input_strategy == ((2, 1), (2, 1))
    assert [tensor.shape for tensor in graph.input_tensors(product)] == [(4, 64), (48, 64)]
    assert product.tensors == (TensorType((4, 48), "float16"),)
    assert str(graph.source(product)[-1]) == "/home/user/net.py:22"
    assert graph.constants[product.inputs[3]] is True
    assert set(graph.parameters) == {"feed_forward.w1", "feed_forward.w2"}
    assert Counter(node.op for node in graph.collectives())["AllGather"] == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "only a part of the file"),
        (lambda text: text.replace("# IR entry", "# entry"), "no text .ir of MindSpore"),
        (lambda text: text.replace("PrimFunc_SiLU(%2)", "PrimFunc_SiLU(%2"), "line 60 is damaged"),
        (lambda text: text.replace("PrimFunc_SiLU(%2)", "PrimFunc_SiLU(%999)"), "line 60 is damaged.*%999"),
        (lambda text: re.sub(r"\nsubgraph @.*?\n}\n", "\n", text, flags=re.DOTALL), "is not in it"),
    ],
)
def test_damage_is_said_with_its_place(change, said, tmp_path):
    path = tmp_path / "graph.ir"
    path.write_text(change(SAMPLE.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(UserError, match=f"graph.ir: .*{said}"):
        read_ir_text(path)


@given(st.integers(0, SAMPLE.stat().st_size), st.binary(max_size=20))
def test_any_damage_is_read_or_said(place, replacement):
    data = SAMPLE.read_bytes()
    text = (data[:place] + replacement + data[place + len(replacement) + 1 :]).decode(errors="replace")
    with suppress(UserError):
        parse_ir_text(text)


def test_types_of_tuples_and_repetitions():
    kind = parse_type("<Tuple[Tensor[Float32]*2,Func,Ref[Tensor[Float16]]], TupleShape((2, 3), (), NoShape, (-1))>")
    assert isinstance(kind, TupleType)
    assert kind.items[0] == TensorType((2, 3), "float32")
    assert kind.items[1] == TensorType((), "float32")
    assert kind.items[3] == TensorType((-1,), "float16")
    weight = parse_type("<Ref[Tensor[BFloat16]], (4, 4), ref_key=model.w, is_parameter>")
    assert weight == TensorType((4, 4), "bfloat16", "model.w")


values = st.recursive(
    st.one_of(st.integers(-9, 9), st.booleans(), st.none(), st.text("abc(),{}[]<> ", max_size=6)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
)


def written(value):
    if isinstance(value, bool):
        return f"Bool({int(value)})"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"({', '.join(map(written, value))})"
    return "None" if value is None else f"I64({value})"


@given(st.lists(values, max_size=4))
def test_values_are_read_as_they_were_written(items):
    assert [parse_value(part) for part in split(", ".join(map(written, items)))] == items
