"""The dry run through its command lines: MindSpore's own figures, extrapolated or not, and what goes wrong."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from dry_run_cases import FormulaSimulations
from small_cluster import cluster_run

from mindllm.cli import dry_run as tool
from mindllm.config import render_config
from mindllm.dry_run import simulations
from mindllm.errors import CheckFailed, UserError
from mindllm.jobs import memory as host_memory

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"num_layers": 10, "seq_length": 256, "hidden_size": 128}
OPTIMIZER = {
    "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run of two stages, and what was simulated for it."""
    directory = tmp_path_factory.mktemp("dry_run")
    config = cluster_run(dp=2, pp=2, micro=24, model=MODEL, recompute_config={"recompute": True}, **OPTIMIZER)
    (directory / "run.yaml").write_text(render_config(config), encoding="utf-8")
    return directory


def start(
    directory, *options, command=(sys.executable, "-m", "toolkit.dry_run", "--config", "run.yaml"), cache="cache"
):
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / cache), "PYTHONPATH": str(ROOT), "COLUMNS": "250"}
    return subprocess.Popen(
        [*map(str, command), *options],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(directory, *options, expect=0, **keywords):
    """Runs the command line to its end; returns what it printed."""
    process = start(directory, *options, **keywords)
    printed, errors = process.communicate()
    assert process.returncode == expect, printed + errors
    assert "Traceback" not in errors
    return printed if expect == 0 else errors


@pytest.fixture(scope="module")
def table(place):
    """What the script prints for people, of a stage extrapolated from fewer micro-batches."""
    script = ROOT / "scripts" / "dry_run.sh"
    return run(place, command=("bash", script, "run.yaml", "4", "2", "--stages", "1"))


def test_the_script_prints_a_table_and_leaves_logs_and_a_page(place, table):
    assert table.count("extrapolated: fewer micro-batches") == 1
    assert table.count("fits") == 1
    assert sorted(path.name for path in (place / "output_dryrun").iterdir()) == ["memory.html", "rank_2.log"]
    log = (place / "output_dryrun" / "rank_2.log").read_text()
    assert log.splitlines()[-5:-2] == [
        "Device MOC memory size: 65536M",
        "MindSpore Used memory size: 59392M",
        "MindSpore memory base address: 0",
    ]
    page = (place / "output_dryrun" / "memory.html").read_text()
    for expected in ("model.layers.*.feed_forward.w1.weight", "linear.py:", "accu_grads."):
        assert expected in page


MANY_LAYERS = ("--model.model_config.num_layers=32", "--parallel_config.micro_batch_num=3")  # found from small runs


@pytest.mark.slow
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("options", [(), MANY_LAYERS], ids=["few", "many"])
def test_extrapolated_and_whole_simulations_agree(place, options):
    fast = json.loads(run(place, "--json", "--stages", "1", *options))
    whole = json.loads(run(place, "--json", "--stages", "1", "--full", "--output", "whole", *options))
    assert fast["fits"]
    for extrapolated, simulated in zip(fast["stages"], whole["stages"], strict=True):
        fragments = "actual_peak_mb"
        assert extrapolated.pop(fragments) == pytest.approx(simulated.pop(fragments), abs=4)
        assert extrapolated == simulated
    page = (place / "whole" / "memory.html").read_text()
    assert "largest blocks" in page
    used = whole["stages"][0]["used_peak_mb"]
    assert f"Used peak memory usage (without fragments): {used}M" in (place / "whole" / "rank_2.log").read_text()


@pytest.mark.usefixtures("table")
def test_the_second_time_nothing_is_simulated(place):
    kept = sorted((place / "cache" / "mindllm" / "dry_run").iterdir())
    before = [path.stat().st_ino for path in kept]
    report = json.loads(run(place, "--json", "--stages", "1", "--max_device_memory", "30GB"))
    assert [stage["stage"] for stage in report["stages"]] == [1]
    assert report["limit_mb"] == 30 * 1024
    assert [path.stat().st_ino for path in kept] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank_size", "8"], r"RANK_SIZE is 8, but .*run.yaml has 4 devices \(.* 2 x 1 x 1 x 2\); use 4"),
        (["--stage_num", "4"], r"STAGES is 4, but .*run.yaml has parallel_config.pipeline_stage 2; use 2"),
        (["--stages", "7"], r"there is no such stage; write 0 to 1"),
        (["--parallel_config.micro_batch_nun=8"], r"did you mean 'micro_batch_num'"),
        (["--max_device_memory", "much"], r"max_device_memory"),
        (["--context.device_target=CPU"], r"context.device_target: only Ascend devices are simulated"),
    ],
)  # fmt: skip
def test_wrong_input_is_explained(place, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        tool.main(["--config", str(place / "run.yaml"), "--output", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("four", "2"), "four is no number of devices or stages"),
        (("4",), "usage: bash scripts/dry_run.sh"),
        (("8", "2"), "use 4"),
    ],
)
def test_the_script_explains_its_arguments(place, arguments, message):
    assert message in run(place, expect=2, command=("bash", ROOT / "scripts" / "dry_run.sh", "run.yaml", *arguments))


class Formula(FormulaSimulations):
    def __init__(self, workers, progress):
        super().__init__()

    def source_lines(self, config):
        return {}


def test_too_little_device_memory_is_a_failed_check(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(simulations, "simulations_here", Formula)
    arguments = ["--config", str(place / "run.yaml"), "--output", str(tmp_path)]
    assert tool.main(arguments) == 0
    with pytest.raises(
        CheckFailed, match=r"stage 0 \(rank 0\) needs 0\.6\d\d GB, 0\.1\d\d GB more than the limit of 0\.500 GB"
    ):
        tool.main([*arguments, "--max_device_memory", "0.5GB", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] is False


def test_too_little_memory_of_this_machine_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(host_memory, "claimed_by_others", lambda directory: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        UserError, match=r"takes about 1\.\d GB of this machine's memory, and there are 0\.6 GB, 60% of"
    ):
        tool.main(["--config", str(place / "run.yaml"), "--output", str(tmp_path)])


def children(pid, parents=None):
    """Processes below a process."""
    parents = parents or dict(_parents())
    found = [child for child, parent in parents.items() if parent == pid]
    return [*found, *(grandchild for child in found for grandchild in children(child, parents))]


def _parents():
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            yield int(directory.name), int((directory / "stat").read_text().rpartition(")")[2].split()[1])


def wait_for_workers(process):
    """The processes that simulate, as soon as there are some: forks of forks of the server."""
    while process.poll() is None:
        parents = dict(_parents())
        forks = [pid for pid in children(process.pid, parents) if b"mindllm.jobs" in _command(pid)]
        workers = [pid for pid in forks if parents[pid] in forks and parents[parents[pid]] in forks]
        if workers:
            return workers
        time.sleep(0.5)
    raise AssertionError(process.communicate())


def _command(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_dry_run_leaves_no_process(place, number):
    process = start(place, cache="interrupted")
    wait_for_workers(process)
    workers = children(process.pid)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    while any(_command(pid) for pid in workers):  # for ever, if one of them was left
        time.sleep(0.1)


def test_a_killed_worker_is_explained(place):
    process = start(place, "--workers", "1", cache="killed")
    os.kill(wait_for_workers(process)[0], signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "too little memory (the system ended it" in errors
    assert not list((place / "killed" / "mindllm" / "dry_run").glob("*"))


def test_without_a_compiler_the_error_names_the_extra(place, monkeypatch):
    monkeypatch.setenv("PATH", str(place))  # a directory without one
    if importlib.util.find_spec("ziglang") is not None:
        pytest.skip("the extra compiler is installed")
    process = start(place, "--output", "without", cache="no_compiler")
    printed, errors = process.communicate()
    assert process.returncode == 2
    assert "simulating a device requires a C compiler" in errors
    assert "pip install 'mindllm[compiler]'" in errors
    assert not printed


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_mixed_recomputation_over_four_stages_agrees(place):
    recompute = ["--recompute_config.recompute=[3,0,4,1]", "--recompute_config.select_recompute=[5,3,4,0]"]
    options = ["--json", "--model.model_config.num_layers=24", "--parallel_config.pipeline_stage=4", *recompute]
    fast, whole = (json.loads(run(place, *options, *more))["stages"] for more in ([], ["--full"]))
    assert [stage["used_peak_mb"] for stage in fast] == [stage["used_peak_mb"] for stage in whole]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_accumulation_steps_agree(place):
    """Six steps from three to five, without a pipeline: the compiler unrolls them. Inputs count as if all were there."""
    sizes = [
        "--parallel_config.pipeline_stage=1",
        "--parallel_config.micro_batch_num=1",
        "--model.model_config.num_layers=4",
    ]
    options = [*sizes, "--json", "--recompute_config.recompute=false", "--runner_config.gradient_accumulation_steps=6"]
    (fast,), (whole,) = (json.loads(run(place, *options, *more))["stages"] for more in ([], ["--full"]))
    for stage in (fast, whole):
        stage.pop("actual_peak_mb")
    assert fast == whole


@pytest.mark.slow
def test_frozen_weights_that_do_not_fit_are_advised_to_be_in_half_precision(place):
    """Of 148 MB in single precision, and half as much of copies, 74 MB are left."""
    wide = {
        "num_layers": 2,
        "hidden_size": 1024,
        "num_heads": 8,
        "n_kv_heads": 8,
        "intermediate_size": 4096,
        "seq_length": 64,
    }
    adapters = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": ".*wq|.*wv"}
    config = cluster_run(model={**wide, "compute_dtype": "bfloat16", "pet_config": adapters})
    (place / "adapters.yaml").write_text(render_config(config), encoding="utf-8")
    command = (sys.executable, "-m", "toolkit.dry_run", "--config", "adapters.yaml")
    needed = json.loads(run(place, "--json", command=command))["stages"][0]["used_peak_mb"]
    limit = f"{(needed - 20) / 1024:.3f}GB"
    said = run(place, "--max_device_memory", limit, "--advice", "1000", command=command, expect=3)
    assert "pet_config.frozen_dtype: bfloat16" in said
    saved = float(said.partition("frozen weights in half precision (at most ")[2].partition("saves ")[2].split()[0])
    assert saved > 0.1
