"""Described devices: shipped ones are whole, wrong ones are refused by key, exchanges take the links they cross."""

import re
from pathlib import Path

import pytest

from mindllm.cli.time import with_error
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import MATRIX, Operator, elementwise, product
from mindllm.timing.device import DEFAULT, DEVICES, Share, read_device, shipped_devices
from mindllm.timing.measured.calibrate import constants, uncalibrated, with_constants
from mindllm.timing.prediction import predict

DEVICE = read_device(DEFAULT)
MEGABYTES = 64e6


@pytest.mark.parametrize("name", shipped_devices())
def test_a_shipped_device_trains_in_half_precision_on_any_number_of_nodes(name):
    device = read_device(name)
    assert device.matrix_rate("bfloat16") == device.matrix_rate("float16")
    assert exchange_seconds("AllReduce", MEGABYTES, Group(4096), device) > exchange_seconds(
        "AllReduce", MEGABYTES, Group(8), device
    )


def test_the_five_devices_of_the_docs_are_shipped():
    assert shipped_devices() == ["a100_80g", "atlas_800t_a2", "atlas_900_a2_pod", "atlas_900_a3", "h100"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("devices: 8", "devices: 1"), "links.0.devices"),
        (("devices: null", "devices: 4"), "each must join more"),
        (("name: Atlas 800T A2", "named: x"), "name"),
        (("353.9e12", "-1"), "matrix_flops.float16.value"),
        (("matrix: {value: 0.6", "matrix: {value: 7.6"), "efficiency.matrix.value"),
        (("vector_flops:", "vector_flop:"), "vector_flops"),
        (("topology: mesh", "topology: torus"), "links.0.topology"),
    ],
)
def test_a_bad_device_is_refused_by_key(tmp_path, change, said):
    path = tmp_path / "device.yaml"
    path.write_text((DEVICES / f"{DEFAULT}.yaml").read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_device(str(path))


def test_an_unknown_device_is_named_with_the_nearest():
    with pytest.raises(UserError, match="atlas_800t_a2"):
        read_device("atlas_800t")


def test_a_figure_or_link_that_is_missing_is_an_error():
    with pytest.raises(UserError, match="matrix_flops has no float8"):
        DEVICE.matrix_rate("float8")
    alone = DEVICE.model_copy(update={"links": DEVICE.links[:1]})
    with pytest.raises(UserError, match="no link joins 16 devices"):
        exchange_seconds("AllGather", MEGABYTES, Group(16), alone)


@pytest.mark.parametrize(
    ("op", "group", "ports", "share"),
    [
        ("AllGather", Group(4), 3, 3 / 4),  # to each of three over its own link
        ("AllReduce", Group(4), 3, 2 * 3 / 4),
        ("AllGather", Group(8), 7, 7 / 8),
    ],
)
def test_a_mesh_has_a_link_for_every_neighbour(op, group, ports, share):
    link = DEVICE.links[0]
    rounds = 2 if op == "AllReduce" else 1
    expected = rounds * link.latency.value + share * MEGABYTES / (ports * link.bandwidth.value * link.efficiency.value)
    assert exchange_seconds(op, MEGABYTES, group, DEVICE) == pytest.approx(expected)


def test_an_exchange_of_each_with_each_crosses_nodes_with_all_that_is_for_them():
    """Two nodes of eight: 7 of 16 parts stay inside, 8 go out; nothing is gathered on the way."""
    inner, outer = DEVICE.links
    inside = 7 / 16 * MEGABYTES / (7 * inner.bandwidth.value * inner.efficiency.value) + inner.latency.value
    between = 8 / 16 * MEGABYTES / (outer.bandwidth.value * outer.efficiency.value) + outer.latency.value
    assert exchange_seconds("AlltoAll", MEGABYTES, Group(16), DEVICE) == pytest.approx(inside + between)


def test_a_group_over_nodes_sends_a_part_of_the_tensor_over_the_outer_link():
    """Two nodes of eight: a ReduceScatter and AllGather inside, an eighth of an AllReduce between."""
    inner, outer = DEVICE.links
    inside = 2 * 7 / 8 * MEGABYTES / (7 * inner.bandwidth.value * inner.efficiency.value) + 2 * inner.latency.value
    between = 2 * 1 / 2 * MEGABYTES / 8 / (outer.bandwidth.value * outer.efficiency.value) + 2 * outer.latency.value
    assert exchange_seconds("AllReduce", MEGABYTES, Group(16), DEVICE) == pytest.approx(inside + between)
    apart = exchange_seconds("AllReduce", MEGABYTES, Group(2, 8), DEVICE)
    assert apart == pytest.approx(between + 7 / 8 * MEGABYTES / (outer.bandwidth.value * outer.efficiency.value))


def test_a_product_is_bound_by_its_operations_or_by_memory():
    reached = DEVICE.efficiency
    large = product("", 8192, 8192, 8192, "bfloat16")
    small = 1 + 3 * reached.half_size.value / 8192
    expected = large.flops / (DEVICE.matrix_rate("bfloat16") * reached.matrix.value) * small
    assert operator_seconds(large, DEVICE) == pytest.approx(expected + reached.launch.value)
    moving = Operator("", MATRIX, 1.0, 1e9, (1e6, 1e6, 1e6))
    streamed = elementwise("", 1e9, 1.0)
    assert operator_seconds(moving, DEVICE) == pytest.approx(operator_seconds(streamed, DEVICE))


def test_a_calibrated_device_remembers_what_was_assumed():
    assumed = uncalibrated(DEVICE)
    assert assumed.efficiency.matrix.value == DEVICE.efficiency.matrix.assumed != DEVICE.efficiency.matrix.value
    assert list(constants(assumed)) == list(constants(DEVICE))
    assert "host" not in constants(DEVICE)  # described as nothing, it stays nothing


def test_groups_of_a_part_of_a_node_share_ports_where_the_link_says_so():
    device = read_device("a100_80g")
    shared = Share(value=0.25, source="four groups at one port")
    outer = device.links[-1].model_copy(update={"part_groups": shared})
    meeting = device.model_copy(update={"links": (*device.links[:-1], outer)})
    alone, part, whole = Group(4, 8), Group(8, 4), Group(32, 1)
    slower = [
        exchange_seconds("AllReduce", MEGABYTES, group, meeting)
        / exchange_seconds("AllReduce", MEGABYTES, group, device)
        for group in (alone, part, whole)
    ]
    assert slower[0] == slower[2] == 1
    assert 2 < slower[1] < 4
    assert "InfiniBand part groups" in constants(meeting)
    assert "InfiniBand part groups" not in constants(device)


def shares_within(range_: float, first: str, column: int) -> tuple[int, int]:
    """How many rows of the published steps are off by no more than ``range_``, and how many there are."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarks" / "step_time.md").read_text(encoding="utf-8")
    cells = [line.split(" | ") for line in page.splitlines() if re.match(first, line)]
    errors = [abs(float(row[column].strip(" %|"))) / 100 for row in cells]
    return sum(error <= range_ for error in errors), len(errors)


ATLAS_ROW = r"\| [\w.-]+ \| [\d,]+ \| [\d,]+ \|"  # published and predicted tokens of a model
A100_ROW = r"\| [\d.]+[BT], (full|selective|dp)[^|]*\|"


@pytest.mark.parametrize(
    ("name", "first", "column", "counted"),
    [
        ("atlas_800t_a2", ATLAS_ROW, 4, (15, 17)),
        ("atlas_900_a2_pod", ATLAS_ROW, 4, (15, 17)),
        ("a100_80g", A100_ROW, 3, (58, 63)),
    ],
)
def test_the_range_of_a_device_is_that_of_its_published_steps(name, first, column, counted):
    known = read_device(name).step_error
    assert shares_within(known.value, first, column) == counted
    assert all(str(number) in known.source for number in counted)
    assert shares_within(known.value - 0.01, first, column)[0] < counted[0]  # and no wider than that


def test_the_range_of_a_device_without_steps_is_not_known():
    assert [name for name in shipped_devices() if read_device(name).step_error is None] == ["atlas_900_a3", "h100"]


def test_other_constants_have_another_range():
    assert DEVICE.step_error
    assert with_constants(DEVICE, {"matrix": 0.5}, "tried").step_error is None
    assert uncalibrated(DEVICE).step_error is None
    assert uncalibrated(read_device("a100_80g")).step_error  # which was never calibrated
    held = [0.01, -0.02, 0.03, 0.04, -0.05, 0.06, 0.07, 0.08, -0.09, 0.5]
    known = with_error(DEVICE, held, "steps.csv").step_error
    assert (known.value, known.source) == (0.5, "10 steps of steps.csv, each by a device fitted to the others")
    assert with_error(DEVICE, [*held, 0.02], "steps.csv").step_error.value == 0.09
    assert with_error(DEVICE, [7.0], "steps.csv").step_error.value == 1.0


def test_a_step_is_said_with_its_range():
    run = load_config("configs/llama2/pretrain_llama2_7b.yaml")
    assert re.fullmatch(r"\d+\.\d{3} s ± 13%", predict(run, DEVICE).in_words)
    assert re.fullmatch(r"\d+\.\d{3} s", predict(run, uncalibrated(DEVICE)).in_words)
    assert predict(run, DEVICE).to_dict()["step_error"] == 0.13
