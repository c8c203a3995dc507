"""A program of somebody in MindSpore's dry run: its ranks' memory, what is kept for other tools, one line for what goes wrong."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from offline_programs import CUDA, FAILS, JIT, NEEDS_CANN, NEVER_TRAINS, PYNATIVE, TRAINS, program

from mindllm.cli.offline import main
from mindllm.compiled.device.stand_in import HOMES
from mindllm.compiled.device.stand_in_names import MACHINES
from mindllm.compiled.inspect.comm import exchanges
from mindllm.compiled.inspect.page import write_page
from mindllm.compiled.inspect.recompute import recomputation
from mindllm.compiled.inspect.redundant import layout_changes
from mindllm.compiled.inspect.source import read_graph
from mindllm.compiled.inspect.summary import compare, summarise
from mindllm.compiled.simulation.simulation import load_simulation
from mindllm.errors import UserError
from mindllm.programs.command_line import devices_of, python_of
from mindllm.programs.kept import KeptRank, kept_config
from mindllm.programs.lockstep import read_rank
from mindllm.programs.simulate import keep_config
from mindllm.units import MIB
from tests.compiled.simulations import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = 2 * (64 * 4096 // 2) * 4  # bytes of both matrices on a rank: half of each


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the tool says of ranks 0 and 3 of four, and the directory it keeps things in."""
    directory = tmp_path_factory.mktemp("offline")
    command = program(directory / "train.py", TRAINS, limit="0.001GB")
    keep = directory / "kept"
    options = ["--devices", "4", "--ranks", "0,3", "--json", "--keep", str(keep)]
    tool = [sys.executable, "-m", "mindllm.main", "offline", *options, "--", *command]
    result = subprocess.run(tool, capture_output=True, text=True, check=False, cwd=directory, timeout=500)
    return result, keep


@needs_compiler
def test_ranks_are_measured_beyond_the_limit_they_are_held_against(trained):
    result, keep = trained
    assert result.returncode == 3, result.stderr
    assert "2 of 2 ranks do not fit; rank " in result.stderr
    said = json.loads(result.stdout)
    assert not said["fits"]
    assert [(row["rank"], row["stage"], row["limit_mb"]) for row in said["ranks"]] == [(0, 0, 1), (3, 0, 1)]
    for row in said["ranks"]:
        assert row["weights_mb"] == round(WEIGHTS / MIB, 1)
        assert row["optimizer_mb"] >= row["weights_mb"]
        assert row["used_peak_mb"] >= 2 * WEIGHTS // MIB
        assert row["compile_seconds"] > 0
    assert not list(keep.rglob(".unread_*"))


@needs_compiler
def test_the_program_ends_after_a_step(trained):
    _, keep = trained
    assert (keep / "rank_0" / "program.log").read_text().count("step ") == 1


@needs_compiler
def test_what_is_kept_is_read_by_the_other_tools(trained, tmp_path):
    _, keep = trained
    simulation = load_simulation(keep / "rank_3" / "simulation.json.gz")
    assert simulation.rank == 3
    assert simulation.used_peak == sum(simulation.peak_by_category().values())
    assert {collective.operator for collective in simulation.collectives} >= {"AllReduce"}
    inspected = read_graph(keep / "rank_3")
    assert inspected.graph.rank == 3
    assert summarise(inspected.graph)["matrix_flops"] > 0
    assert {exchange.operator for exchange in exchanges(inspected.graph)} >= {"AllReduce"}
    totals = compare(read_graph(keep / "rank_0").graph, inspected.graph)["totals"]
    assert all(first == second for first, second in totals.values())
    recomputation(inspected)
    layout_changes(inspected.graph)
    write_page(inspected.graph, inspected.name, tmp_path / "graph.html")
    executable = read_rank(KeptRank(3, keep / "rank_3"))
    assert executable.graph.parameters["first.weight"].layout.full_shape == (4096, 64)
    assert (executable.initial["momentum"], executable.slices) == (pytest.approx(0.9), 1)
    page = (keep / "memory.html").read_text()
    assert "train.py:" in page
    assert "Rank 3" in page


def test_the_yaml_of_the_program_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("recompute_config: {select_recompute: {'feed_forward.mul': [1, 0]}}")
    keep = tmp_path / "kept"
    keep.mkdir()
    keep_config(["python", "run_mindformer.py", "--config", "run.yaml"], keep)
    assert kept_config(keep)["recompute_config"]["select_recompute"] == {"feed_forward.mul": [1, 0]}
    keep_config(["python", "train.py"], keep)
    assert kept_config(keep) == {}


@needs_compiler
def test_a_step_under_jit_on_one_device(tmp_path, capsys):
    keep = tmp_path / "kept"
    assert main(["--json", "--keep", str(keep), "--", *program(tmp_path / "train.py", JIT)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["fits"]) == (1, True)
    (row,) = told["ranks"]
    assert (row["weights_mb"], row["limit_mb"]) == (
        1.0,
        61430,
    )  # the program says nothing: what MindSpore takes of 64 GB
    assert (keep / "rank_0" / "program.log").read_text().count("step ") == 1
    assert "MatMul" in {row["operator"] for row in summarise(read_graph(keep / "rank_0").graph)["by_operator"]}
    executable = read_rank(KeptRank(0, keep / "rank_0"))
    assert {"weight", "stat.weight"} <= set(executable.graph.parameters)
    assert executable.initial["stat.weight"] == 1.0  # SGD's velocity has no value yet


@needs_compiler
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (PYNATIVE, "ran in PyNative mode"),
        (NEVER_TRAINS, "never trained: it ran no graph with a backward pass"),
        (CUDA, "sets device_target CPU"),
        (NEEDS_CANN, "needs acl, a Python package of CANN"),
        (FAILS, "failed with ValueError: no corpus at /data before it imported MindSpore"),
    ],
    ids=["PyNative", "never trains", "another device", "CANN", "fails first"],
)
def test_a_program_that_tells_nothing_ends_with_one_line(tmp_path, body, said):
    with pytest.raises(UserError, match=said) as raised:
        main(["--keep", str(tmp_path / "kept"), "--", *program(tmp_path / "train.py", body)])
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    assert (tmp_path / "kept" / "rank_0" / "program.log").is_file()


def test_ranks_of_a_run_over_more_devices_do_not_stay(tmp_path):
    """The check would take them for ranks of this program, and wait for them for ever."""
    keep = tmp_path / "kept"
    for number in (0, 3):
        (keep / f"rank_{number}").mkdir(parents=True)
        (keep / f"rank_{number}" / "simulation.json.gz").write_bytes(b"")
    with pytest.raises(UserError, match="failed with ValueError"):
        main(["--devices", "2", "--keep", str(keep), "--", *program(tmp_path / "train.py", FAILS)])
    assert not (keep / "rank_3").exists()


def test_no_program_is_one_line(capsys):
    with pytest.raises(UserError, match="no program is given; write it after --"):
        main([])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["msrun", "--worker_num=8", "train.py"], "msrun starts a process for each device; give the command of one"),
        (["./no_such_program"], "no_such_program: command not found"),
    ],
)
def test_what_is_not_one_process(tmp_path, command, said):
    with pytest.raises(UserError, match=said):
        main(["--keep", str(tmp_path), "--", *command])


def test_no_c_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    for name in HOMES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"simulating a device requires a C compiler.*install gcc") as raised:
        main(["--keep", str(tmp_path / "kept"), "--", *program(tmp_path / "train.py", FAILS)])
    assert "\n" not in str(raised.value)


def _python_with(directory, version, machine=62):
    """A Python that finds a MindSpore of this version, built for this number of a processor."""
    package = directory / "mindspore"
    (package / "lib" / "plugin").mkdir(parents=True)
    (package / "lib" / "plugin" / "libmindspore_ascend.so.2").touch()
    header = b"\x7fELF\x02\x01" + bytes(12) + machine.to_bytes(2, "little") + bytes(44)
    (package / "lib" / "libmindspore_core.so").write_bytes(header)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\necho \'["{package}/__init__.py", "{version}"]\'\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    ("version", "machine", "said"),
    [
        ("2.6.0", "x86_64", r"verified with MindSpore 2\.7, .*2\.10, not 2\.6\.0"),
        ("2.9.0", "aarch64", r"is built for aarch64, and this machine is x86_64; install the wheel for it"),
    ],
    ids=["version", "architecture"],
)
def test_another_mindspore(tmp_path, monkeypatch, version, machine, said):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    python = _python_with(tmp_path, version, MACHINES[machine])
    with pytest.raises(UserError, match=said) as raised:
        main(["--python", python, "--keep", str(tmp_path / "kept"), "--", sys.executable, "train.py"])
    assert "\n" not in str(raised.value)


def test_no_mindspore_at_all(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho null\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match="MindSpore is not installed for "):
        main(["--keep", str(tmp_path / "kept"), "--", str(python), "train.py"])


def test_devices_are_those_of_the_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"data_parallel": 2, "model_parallel": 4, "pipeline_stage": 8}
    (tmp_path / "run.yaml").write_text(json.dumps({"use_parallel": True, "parallel_config": sizes}))
    (tmp_path / "alone.yaml").write_text(json.dumps({"use_parallel": False, "parallel_config": sizes}))
    assert devices_of(["python", "run_mindformer.py", "--config", "run.yaml"]) == 64
    assert devices_of(["python", f"{tmp_path}/run_mindformer.py", "--config=run.yaml"]) == 64
    assert devices_of(["python", "run_mindformer.py", "--config", "alone.yaml"]) is None
    assert devices_of(["python", "train.py", "--config", "missing.yaml"]) is None


def test_the_python_of_a_command(tmp_path):
    script = tmp_path / "train"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    assert python_of([str(script)]) == sys.executable
    assert python_of([sys.executable, "train.py"]) == sys.executable


@pytest.mark.parametrize("ranks", ["first", "0,", "0,4"])
def test_ranks_that_are_none(tmp_path, ranks):
    with pytest.raises(UserError, match=f"--ranks {ranks}"):
        main(["--devices", "4", "--ranks", ranks, "--keep", str(tmp_path), "--", sys.executable, "train.py"])


@needs_compiler
def test_the_environment_for_a_shell(tmp_path):
    tool = [sys.executable, "-m", "mindllm.main", "offline", "--devices", "16", "--ranks", "9", "--env"]
    printed = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    show = 'echo "$RANK_ID $RANK_SIZE $MS_SIMULATION_LEVEL"'
    shell = subprocess.run(["bash", "-c", f"{printed}\n{show}"], capture_output=True, text=True, check=True)
    assert shell.stdout.split() == ["9", "16", "1"]


def test_data_of_the_packages_is_in_the_wheel():
    tomllib = pytest.importorskip("tomllib")
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {
        path
        for package, names in patterns.items()
        for name in names
        for path in (ROOT / package.replace(".", "/")).glob(name)
    }
    tracked = subprocess.run(["git", "ls-files", "mindllm"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("the sources are not those of a repository")
    data = {ROOT / name for name in tracked.stdout.splitlines() if not name.endswith(".py")}
    assert data <= listed
