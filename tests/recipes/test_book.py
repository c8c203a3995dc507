"""The plan book: layouts for fewer nodes beside a run, their global batch, and what is said where there is none."""

import json
import os

import pytest

from mindllm.cli.plan.configure import main
from mindllm.config import load_config
from mindllm.config.reading.yaml_tree import read_yaml
from mindllm.errors import CheckFailed, UserError
from mindllm.recipes.book import devices_of_node, spare_counts
from mindllm.timing.device import read_device

DEVICE = read_device("atlas_800t_a2")
QUICK = ["llama3_2_1b", "--quick", "--seq", "1024", "--max-stages", "1", "--max-tensor-parallel", "1"]


def configure(tmp_path, *options):
    code = main([*QUICK, *options, "-o", str(tmp_path / "run.yaml")])
    return code, read_yaml((tmp_path / "run.book.yaml").read_text(), "book").data


def test_a_book_names_a_layout_for_each_node_fewer(tmp_path, capsys):
    code, book = configure(tmp_path, "--devices", "24", "--spares", "2", "--global-batch", "48")
    assert code == 0
    assert book == {
        "node_devices": 8,
        "global_batch": 48,
        "layouts": {"24": "run.yaml", "16": "run.spare_1.yaml", "8": "run.spare_2.yaml"},
    }
    for devices, name in book["layouts"].items():
        config = load_config(tmp_path / name)
        assert (config.parallel_config.device_num, config.global_batch_size) == (int(devices), 48)
    shown = capsys.readouterr().out
    assert "run.spare_2.yaml: dp" in shown
    assert "a book of 3 layouts" in shown


def test_spares_of_an_earlier_command_do_not_stay(tmp_path):
    own = tmp_path / "run.spare_9.yaml"
    own.write_text("base: run.yaml  # of a person\n")
    os.mkfifo(tmp_path / "run.spare_8.yaml")
    configure(tmp_path, "--devices", "24", "--spares", "2", "--global-batch", "48")
    configure(tmp_path, "--devices", "24", "--spares", "1", "--global-batch", "48")
    spares = sorted(path.name for path in tmp_path.glob("*.spare_*.yaml"))
    assert spares == ["run.spare_1.yaml", "run.spare_8.yaml", own.name]


def test_a_batch_that_fewer_devices_do_not_divide_is_said_and_left_out(tmp_path, capsys):
    code, book = configure(tmp_path, "--devices", "32", "--spares", "1", "--global-batch", "32", "--json")
    assert code == CheckFailed.exit_code
    assert book["layouts"] == {"32": "run.yaml"}
    assert not (tmp_path / "run.spare_1.yaml").exists()
    _, missing = json.loads(capsys.readouterr().out)["layouts"]
    assert (missing["devices"], missing["written"]) == (24, None)
    assert "24 replicas do not divide 32 sequences; --global-batch 96 serves both" in missing["reason"]


@pytest.mark.parametrize(
    ("devices", "spares", "says"),
    [
        (12, 1, "12 devices are no whole nodes of 8; take a multiple of 8"),
        (4, 1, "4 devices are no whole nodes of 8"),
        (8, 1, "no node is left without 1; take at least 16 devices"),
        (16, 2, "no node is left without 2; take at least 24 devices"),
    ],
)
def test_nodes_that_cannot_be_missed_are_refused(devices, spares, says):
    with pytest.raises(UserError, match=says):
        spare_counts(devices, 8, spares)


def test_a_number_of_devices_that_is_not_compiled_is_refused():
    assert spare_counts(8, 4, 1) == (4,)
    with pytest.raises(
        UserError, match="6 devices would be left, and MindSpore compiles for 1, 2, 4 or a multiple of 8"
    ):
        spare_counts(8, 2, 2)


def test_a_node_is_what_the_innermost_link_joins():
    assert devices_of_node(DEVICE, None) == 8
    assert devices_of_node(DEVICE, 2) == 2
    endless = DEVICE.model_copy(update={"links": DEVICE.links[-1:]})
    with pytest.raises(UserError, match="give --node-devices"):
        devices_of_node(endless, None)


def test_the_devices_of_a_node_alone_are_refused():
    with pytest.raises(UserError, match="give --spares N too"):
        main([*QUICK, "--devices", "8", "--node-devices", "2"])
