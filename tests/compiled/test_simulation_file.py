"""A simulation on disk, and what the parts of memory count as."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindllm.compiled.simulation.memory_tracker import category
from mindllm.compiled.simulation.simulation import (
    ACTIVATIONS,
    CATEGORIES,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Block,
    Collective,
    Simulation,
    Task,
    load_simulation,
    operator_of,
    path_of,
)
from mindllm.errors import UserError

LAYER = "Default/network-SeededLoss/model-Decoder/layers-CellList/3-DecoderLayer/ffn-FeedForward"
numbers = st.integers(0, 2**63 - 1)
names = st.text(max_size=20)
blocks = st.builds(
    Block,
    start=numbers,
    end=st.none() | numbers,
    address=numbers,
    stream=numbers,
    size=numbers,
    kind=names,
    node=names,
    users=st.lists(numbers, max_size=3).map(tuple),
    category=st.sampled_from(CATEGORIES),
)
collectives = st.builds(
    Collective,
    position=numbers,
    node=names,
    operator=names,
    group=names,
    ranks=st.lists(numbers, max_size=4).map(tuple),
    peer=st.none() | numbers,
    shape=names,
    dtype=names,
    sent=numbers,
    received=numbers,
)
simulations = st.builds(
    Simulation,
    rank=numbers,
    stage=numbers,
    device_memory=numbers,
    limit=numbers,
    used_peak=numbers,
    actual_peak=numbers,
    blocks=st.lists(blocks, max_size=3).map(tuple),
    tasks=st.lists(st.builds(Task, time=numbers, node=names, stream=numbers), max_size=3).map(tuple),
    collectives=st.lists(collectives, max_size=3).map(tuple),
    messages=st.lists(names, max_size=2).map(tuple),
)


@given(simulation=simulations)
def test_what_was_saved_is_loaded(tmp_path_factory, simulation):
    path = tmp_path_factory.getbasetemp() / "saved.simulation"
    simulation.save(path)
    assert load_simulation(path) == simulation


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        gzip.compress(b"text", mtime=0),
        gzip.compress(b"[]", mtime=0),
        gzip.compress(json.dumps({"format": "another"}).encode(), mtime=0),
        gzip.compress(json.dumps({"format": "mindllm simulation 1", "blocks": 3}).encode(), mtime=0),
        gzip.compress(json.dumps({"format": "mindllm simulation 1"}).encode() * 99, mtime=0)[:40],
    ],
)
def test_a_foreign_or_damaged_file(tmp_path, content):
    path = tmp_path / "x.simulation"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.simulation"):
        load_simulation(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_simulation(tmp_path / "absent")


@pytest.mark.parametrize(
    ("kind", "node", "users", "expected"),
    [
        ("Weight", "model.layers.0.attention.wq.weight", [], WEIGHTS),
        ("Weight", "adam_v.model.norm_out.weight", [], OPTIMIZER),
        ("Weight", "accu_grads.lm_head.weight", [], GRADIENTS),
        ("Weight", "accumulated.lm_head.weight", [], GRADIENTS),
        ("Weight", "model.tables.0.attention_mask", [], OTHER),
        ("ConstantValue", "Default/data-3", [], OTHER),
        ("Kernel", f"{LAYER}/AllGather-op3", [f"{LAYER}/MatMul-op1"], COMMUNICATION),
        ("Kernel", f"{LAYER}/MatMul-op1", [f"Gradients/{LAYER}/MatMul-op2"], ACTIVATIONS),
        ("Kernel", f"Gradients/{LAYER}/MatMul-op2", [f"Gradients/{LAYER}/Mul-op2"], ACTIVATIONS),
        ("Kernel", f"Gradients/{LAYER}/MatMul-op2", ["Default/update-ApplyGradients/global_norm-N/Mul-op1"], GRADIENTS),
        ("Kernel", f"Gradients/{LAYER}/MatMul-op2", [f"Gradients/{LAYER}/AssignAdd-op1"], GRADIENTS),
        ("Kernel", "Default/update-ApplyGradients/optimizer-AdamW/Mul-op7", [], OPTIMIZER),
    ],
)
def test_what_a_block_counts_as(kind, node, users, expected):
    assert category(kind, node, users) == expected


def test_names_of_operators():
    assert operator_of(f"{LAYER}/MatMul-op12") == "MatMul"
    assert path_of(f"Gradients/{LAYER}/MatMul-op12") == "network.model.layers.3.ffn"
    assert operator_of("model.layers.3.weight") == operator_of("Default/data-0") == operator_of("input-op") == ""
    assert path_of("model.layers.3.weight") == "model.layers.3.weight"
