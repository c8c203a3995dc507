"""The dry run through its command lines: MindSpore's own figures, extrapolated or not, and what goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dry_run_cases import FormulaSimulations
from small_cluster import cluster_run

from mindllm.config import render_config
from mindllm.errors import CheckFailed, UserError
from toolkit.dry_run import __main__ as tool
from toolkit.dry_run import simulations

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300  # seconds
MODEL = {"num_layers": 10, "seq_length": 256, "hidden_size": 128}
OPTIMIZER = {
    "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run of two stages, and what was simulated for it."""
    directory = tmp_path_factory.mktemp("dry_run")
    config = cluster_run(dp=2, pp=2, micro=8, model=MODEL, recompute_config={"recompute": True}, **OPTIMIZER)
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
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == expect, printed + errors
    assert "Traceback" not in errors
    return printed if expect == 0 else errors


@pytest.fixture(scope="module")
def table(place):
    """What the script prints for people, of stages extrapolated from small simulations."""
    return run(place, command=("bash", ROOT / "scripts" / "dry_run.sh", "run.yaml", "4", "2"))


def test_the_script_prints_a_table_and_leaves_logs_and_a_page(place, table):
    assert table.count("extrapolated: 4 smaller runs") == 2
    assert table.count("fits") == 2
    assert sorted(path.name for path in (place / "output_dryrun").iterdir()) == [
        "memory.html",
        "rank_0.log",
        "rank_2.log",
    ]
    log = (place / "output_dryrun" / "rank_2.log").read_text()
    assert log.splitlines()[-5:-2] == [
        "Device MOC memory size: 65536M",
        "MindSpore Used memory size: 59392M",
        "MindSpore memory base address: 0",
    ]
    page = (place / "output_dryrun" / "memory.html").read_text()
    for expected in ("model.layers.*.feed_forward.w1.weight", "linear.py:", "accu_grads."):
        assert expected in page


@pytest.mark.usefixtures("table")
def test_extrapolated_and_whole_simulations_agree(place):
    fast = json.loads(run(place, "--json"))
    whole = json.loads(run(place, "--json", "--full", "--output", "whole"))
    assert fast["fits"]
    for extrapolated, simulated in zip(fast["stages"], whole["stages"], strict=True):
        fragments = "actual_peak_mb"
        assert extrapolated.pop(fragments) == pytest.approx(simulated.pop(fragments), abs=2)
        assert extrapolated == simulated
    page = (place / "whole" / "memory.html").read_text()
    assert "largest blocks" in page
    used = whole["stages"][0]["used_peak_mb"]
    assert f"Used peak memory usage (without fragments): {used}M" in (place / "whole" / "rank_0.log").read_text()


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
        (("8", "2"), "RANK_SIZE is 8, but run.yaml has 4 devices"),
        (("4", "4"), "STAGES is 4, but run.yaml has parallel_config.pipeline_stage 2; write 2"),
        (("four", "2"), "four is no number of devices or stages"),
        (("4", "2", "--stages", "7"), "there is no such stage; write 0 to 1"),
        (("4", "2", "--parallel_config.micro_batch_nun=8"), "did you mean 'micro_batch_num'"),
        (("4", "2", "--max_device_memory", "much"), "max_device_memory"),
        (("4", "2", "--context.device_target=CPU"), "context.device_target"),
    ],
)
def test_wrong_input_is_explained(place, arguments, message):
    command = ("bash", ROOT / "scripts" / "dry_run.sh", "run.yaml", *arguments)
    assert message in run(place, expect=2, command=command)


class Formula(FormulaSimulations):
    def __init__(self, workers, console):
        super().__init__()

    def source_lines(self, config):
        return {}


def test_too_little_device_memory_is_a_failed_check(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "Simulations", Formula)
    arguments = ["--config", str(place / "run.yaml"), "--output", str(tmp_path)]
    assert tool.main(arguments) == 0
    with pytest.raises(CheckFailed, match=r"stage 0 \(rank 0\) needs 611 MB, 99 MB more than the limit of 512 MB"):
        tool.main([*arguments, "--max_device_memory", "0.5GB", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fits"] is False


def test_too_little_memory_of_this_machine_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(simulations, "available_bytes", lambda: 300 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"takes about \d+ MB of this machine's memory, and 285 MB are left"):
        tool.main(["--config", str(place / "run.yaml"), "--output", str(tmp_path)])


def children(pid):
    """Processes below a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except (OSError, ValueError):
            continue
        if facts.get("PPid") == str(pid):
            child = int(status.parent.name)
            found += [child, *children(child)]
    return found


def wait_for_workers(process):
    """The processes that simulate, as soon as there are some."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        workers = [
            pid
            for pid in children(process.pid)
            if b"simulate_worker" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
        ]
        if workers:
            return workers
        time.sleep(0.05)
    raise AssertionError(process.communicate())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_dry_run_leaves_no_process(place, number):
    process = start(place, cache="interrupted")
    wait_for_workers(process)
    workers = children(process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in errors
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_killed_worker_is_explained(place):
    process = start(place, "--workers", "1", cache="killed")
    os.kill(wait_for_workers(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "too little memory (the system ended it" in errors
    assert not list((place / "killed" / "mindllm" / "dry_run").glob("*"))


@pytest.mark.slow
def test_mixed_recomputation_over_four_stages_agrees(place):
    recompute = ["--recompute_config.recompute=[3,0,4,1]", "--recompute_config.select_recompute=[5,3,4,0]"]
    options = ["--json", "--model.model_config.num_layers=24", "--parallel_config.pipeline_stage=4", *recompute]
    fast, whole = (json.loads(run(place, *options, *more))["stages"] for more in ([], ["--full"]))
    assert [stage["used_peak_mb"] for stage in fast] == [stage["used_peak_mb"] for stage in whole]
