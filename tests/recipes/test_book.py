"""The plan book: layouts for fewer nodes beside a run, their global batch, and what is said where there is none."""

import json
import os

import pytest

import mindllm
from mindllm.cli.configure import main
from mindllm.cli.convert import main as convert_main
from mindllm.cli.plan import main as plan_main
from mindllm.cli.search import main as search_main
from mindllm.config import load_config
from mindllm.config.reading.yaml_tree import read_yaml
from mindllm.errors import CheckFailed, UserError
from mindllm.recipes.book import devices_of_node, spare_counts
from mindllm.strategies.constraints import Constraints
from mindllm.timing.device import read_device
from tests.mindformers.mindformers_files import LEGACY, writer

DEVICE = read_device("atlas_800t_a2")
QUICK = ["llama3_2_1b", "--quick", "--seq", "1024", "--max-stages", "1", "--max-tensor-parallel", "1"]

TWO_STAGES = [f"--parallel_config.{key}" for key in ("pipeline_stage=2", "data_parallel=8", "micro_batch_num=4")]
TWO_STAGES += ["--model.model_config.offset=[0,0]", "--recompute_config.recompute=[0,0]"]


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
    assert "a plan book of 3 layouts" in shown


def test_spares_of_an_earlier_command_do_not_stay(tmp_path):
    own = tmp_path / "run.spare_9.yaml"
    own.write_text("base: run.yaml  # of a person\n")
    os.mkfifo(tmp_path / "run.spare_8.yaml")
    configure(tmp_path, "--devices", "24", "--spares", "2", "--global-batch", "48")
    configure(tmp_path, "--devices", "24", "--spares", "1", "--global-batch", "48")
    spares = sorted(path.name for path in tmp_path.glob("*.spare_*.yaml"))
    assert spares == ["run.spare_1.yaml", "run.spare_8.yaml", own.name]


BOOK_OF_TWO = ("--devices", "16", "--spares", "1", "--global-batch", "48")


def test_another_run_at_the_same_place_ends_the_book(tmp_path, capsys):
    """A restart would take layouts of the run that was there; the same run again keeps them, and what is not ours stays."""
    configure(tmp_path, *BOOK_OF_TWO)
    plain = [*QUICK, "--global-batch", "48", "-o", str(tmp_path / "run.yaml"), "--devices"]
    capsys.readouterr()
    main([*plain, "16"])
    assert "removed" not in capsys.readouterr().err
    assert (tmp_path / "run.book.yaml").exists()
    (tmp_path / "run.spare_2.yaml").write_text("base: run.yaml  # of a person\n")
    main([*plain, "8"])
    gone = f"removed files of another run next to {tmp_path}/run.yaml: run.book.yaml, run.spare_1.yaml"
    assert gone in capsys.readouterr().err.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.spare_2.yaml", "run.yaml"]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        pytest.param(
            plan_main,
            ("--config", "{run}", "--apply", "--output", "{run}", *TWO_STAGES),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            search_main,
            ("{run}", "--seconds", "1", "--apply", "{run}", "--output", "{directory}"),
            marks=pytest.mark.slow,
        ),
        (convert_main, ("{theirs}", "--output", "{run}")),
    ],
    ids=["plan", "search", "convert"],
)
def test_a_run_that_another_command_writes_there_ends_the_book_too(tmp_path, capsys, command, options):
    configure(tmp_path, "--devices", "16", "--spares", "1", "--global-batch", "32")
    places = {"run": tmp_path / "run.yaml", "directory": tmp_path / "out", "theirs": writer(tmp_path)(LEGACY, {})}
    assert command([one.format(**places) for one in options]) == 0
    assert not (tmp_path / "run.book.yaml").exists()
    assert not (tmp_path / "run.spare_1.yaml").exists()
    gone = f"removed files of another run next to {tmp_path}/run.yaml: run.book.yaml, run.spare_1.yaml"
    assert gone in capsys.readouterr().err.replace("\n", " ")


def test_a_book_that_is_not_ours_stays(tmp_path):
    (tmp_path / "run.book.yaml").write_text("chapters: 3\n")
    main([*QUICK, "--devices", "8", "--global-batch", "48", "-o", str(tmp_path / "run.yaml")])
    assert (tmp_path / "run.book.yaml").read_text() == "chapters: 3\n"


def test_from_python_a_book_is_that_of_the_command(tmp_path, capsys):
    options = {"quick": True, "seq_length": 1024, "global_batch": 48}
    options["constraints"] = Constraints(most_tensor=1, most_stages=1)
    found = mindllm.configure("llama3_2_1b", 16, spares=1, **options)
    assert [layout.devices for layout in found.layouts] == [16, 8]
    assert repr(found).startswith("<Book: 2 layouts, dp")
    assert found.config.parallel_config.device_num == 16
    (tmp_path / "python").mkdir()
    found.write(tmp_path / "python" / "run.yaml")
    _, book = configure(tmp_path, *BOOK_OF_TWO, "--json")
    told = json.loads(capsys.readouterr().out)["layouts"]
    assert found.to_dict()["layouts"] == [{key: one[key] for key in one if key != "written"} for one in told]
    assert read_yaml((tmp_path / "python/run.book.yaml").read_text(), "book").data == book
    for name in ("run.yaml", "run.spare_1.yaml"):
        assert load_config(tmp_path / "python" / name) == load_config(tmp_path / name)
    alone = mindllm.configure("llama3_2_1b", 8, **options)
    removed = alone.write(tmp_path / "python" / "run.yaml")
    assert [path.name for path in removed] == ["run.book.yaml", "run.spare_1.yaml"]
    with pytest.raises(UserError) as refused:
        mindllm.configure("llama3_2_1b", 8, node_devices=2, **options)
    assert (refused.value.key, refused.value.value) == ("node_devices", 2)


def test_a_batch_that_fewer_devices_do_not_divide_is_said_and_left_out(tmp_path, capsys):
    code, book = configure(tmp_path, "--devices", "32", "--spares", "1", "--global-batch", "32", "--json")
    assert code == CheckFailed.exit_code
    assert book["layouts"] == {"32": "run.yaml"}
    assert not (tmp_path / "run.spare_1.yaml").exists()
    _, missing = json.loads(capsys.readouterr().out)["layouts"]
    assert (missing["devices"], missing["written"]) == (24, None)
    assert "24 replicas do not divide 32 sequences; --global-batch 96 fits both" in missing["reason"]


@pytest.mark.parametrize(
    ("devices", "spares", "says"),
    [
        (12, 1, "12 devices do not fill whole nodes of 8; use a multiple of 8"),
        (4, 1, "4 devices do not fill whole nodes of 8"),
        (8, 1, "1 nodes of 8 devices leave none; use at least 16 devices"),
        (16, 2, "2 nodes of 8 devices leave none; use at least 24 devices"),
    ],
)
def test_nodes_that_cannot_be_missed_are_refused(devices, spares, says):
    with pytest.raises(UserError, match=says):
        spare_counts(devices, 8, spares)


def test_a_number_of_devices_that_is_not_compiled_is_refused():
    assert spare_counts(8, 4, 1) == (4,)
    with pytest.raises(
        UserError, match="6 devices would remain, and MindSpore compiles for 1, 2, 4 or a multiple of 8"
    ):
        spare_counts(8, 2, 2)


def test_a_node_is_what_the_innermost_link_joins():
    assert devices_of_node(DEVICE, None) == 8
    assert devices_of_node(DEVICE, 2) == 2
    endless = DEVICE.model_copy(update={"links": DEVICE.links[-1:]})
    with pytest.raises(UserError, match="pass --node-devices"):
        devices_of_node(endless, None)


def test_the_devices_of_a_node_alone_are_refused():
    with pytest.raises(UserError, match="--node-devices requires --spares"):
        main([*QUICK, "--devices", "8", "--node-devices", "2"])
