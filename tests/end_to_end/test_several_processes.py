"""Several processes on CPU compute what one does; they stop, fail, resume and evaluate as one."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT, read_lines, run, trajectory

from mindllm.train.checkpoint import load_checkpoint

# Loss scales high enough to overflow at first, gradients long enough to be clipped.
HARD = (
    "--runner_wrapper.scale_sense={type: DynamicLossScaleUpdateCell, loss_scale_value: 1.5e+20, scale_window: 4}",
    "--runner_wrapper.max_grad_norm=0.5",
    "--runner_config.train_steps=100000",
    "--lr_schedule.total_steps=100",
)
TWO = ("--use_parallel=true", "--parallel_config.data_parallel=2", "--batch_size=2", "--eval_dataset.batch_size=2")
ONE = ("--batch_size=2", "--gradient_accumulation_steps=2", "--eval_dataset.batch_size=4")
UNTIL_12 = "--runner_config.stop_step=12"
WATCHED = "--monitor_config={monitor_on: true, max_attention_logit_format: log}"
KEEP_ALL = "--callbacks.3.keep_checkpoint_max=100000"


def launch(config_file, output, *options, restart=0, program=ROOT / "run_llm.py"):
    """Starts two processes through the script, again ``restart`` times at most."""
    words = [program, "--config", config_file, f"--output_dir={output}", *TWO, *options]
    command = " ".join(f"'{word}'" for word in words)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "COLUMNS": "250",
    }
    log_dir = output.parent / f"{output.name}_log"
    return subprocess.Popen(
        ["bash", ROOT / "scripts" / "msrun_launcher.sh", f"--restart={restart}", command, "2", "0", log_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=output.parent,
    )


def end(process, expect=0):
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == expect, printed
    assert "Traceback" not in printed
    return printed


def read_until(process, text):
    lines = []
    for line in process.stdout:
        if text in line:
            return
        lines.append(line)
    raise AssertionError(f"no line with {text}: {''.join(lines)}")


def assert_same(mine, theirs):
    """Two lists of records are the same, losses within 1e-5, norms in proportion."""
    for one, two in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
        assert (one["global_norm"] or 0) == pytest.approx(two["global_norm"] or 0, rel=1e-4)
        assert {**one, "loss": 0, "global_norm": 0} == {**two, "loss": 0, "global_norm": 0}


@pytest.fixture(scope="module")
def single(config_file, tmp_path_factory):
    """Twelve steps of one process."""
    output = tmp_path_factory.mktemp("single") / "out"
    run(config_file, output, *HARD, *ONE, UNTIL_12, KEEP_ALL, WATCHED)
    return output


@pytest.fixture(scope="module")
def double(config_file, tmp_path_factory):
    """The same run by two processes, stopped by SIGTERM some time after step 12."""
    output = tmp_path_factory.mktemp("double") / "out"
    process = launch(config_file, output, *HARD, KEEP_ALL, WATCHED)
    read_until(process, "step:[   12/")
    process.send_signal(signal.SIGTERM)
    end(process)
    return output


def test_two_processes_have_the_losses_of_one(single, double):
    records = trajectory(double)
    assert len(records) >= 12
    assert_same(records[:12], trajectory(single))
    overflows = [record["overflow"] for record in records[:12]]
    assert True in overflows
    assert False in overflows
    assert max(record["global_norm"] or 0 for record in records[:12]) > 0.5


def test_two_processes_have_the_health_figures_of_one(single, double):
    for one, two in zip(*(read_lines(output / "metrics.jsonl")[:12] for output in (single, double)), strict=True):
        assert one["health"].keys() == two["health"].keys()
        assert "max_attention_logit/layer_1" in one["health"]
        assert one["overflow_share"] == two["overflow_share"]
        for name, value in one["health"].items():
            assert two["health"][name] == (None if value is None else pytest.approx(value, rel=1e-3)), name
    assert 0 < two["overflow_share"] < 1


def test_held_out_text_is_shared_among_processes(single, double):
    mine, theirs = (read_lines(output / "evaluation.jsonl")[:2] for output in (double, single))
    for one, two in zip(mine, theirs, strict=True):
        assert one["tokens"] == two["tokens"]
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)


def test_sigterm_stops_all_after_the_same_step_with_a_checkpoint(double):
    last = trajectory(double)[-1]["step"]
    assert (double / "checkpoint" / f"llm-{last}").is_dir()
    for rank in range(2):
        log = (double / "log" / f"rank_{rank}" / "info.log").read_text()
        assert f"stopping after step {last}: SIGTERM" in log


def test_files_of_a_run_are_written_once_and_logs_by_every_rank(double):
    steps = [record["step"] for record in read_lines(double / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(list((double / "summary").iterdir())) == 1
    assert "saved checkpoint" in (double / "log" / "rank_0" / "info.log").read_text()
    assert "saved checkpoint" not in (double / "log" / "rank_1" / "info.log").read_text()
    assert "step:[   12/" in (double.parent / "out_log" / "worker_1.log").read_text()


def test_one_process_goes_on_where_two_have_stopped(config_file, single, double, tmp_path):
    output = tmp_path / "out"
    printed = run(config_file, output, *HARD, *ONE, UNTIL_12, f"--resume_training={double}/checkpoint/llm-6")
    assert "losses will differ" not in printed
    assert_same(trajectory(output), trajectory(single)[6:])


def test_two_processes_go_on_where_one_has_stopped_until_one_of_them_is_killed(config_file, single, tmp_path):
    output = tmp_path / "out"
    process = launch(config_file, output, *HARD, f"--resume_training={single}/checkpoint/llm-6")
    read_until(process, "step:[   12/")
    victims = ranks_of(output)
    os.kill(victims[1], signal.SIGKILL)
    printed = end(process, expect=1)
    assert "rank 1 was killed by SIGKILL" in printed
    assert re.search(r"last step of each rank: 1\d \(rank", printed)
    assert not any(Path(f"/proc/{victim}").exists() for victim in victims.values())
    assert_same(trajectory(output)[:6], trajectory(single)[6:])


def test_a_job_whose_rank_is_killed_goes_on_by_itself_from_its_last_checkpoint(config_file, single, tmp_path):
    output = tmp_path / "out"
    process = launch(config_file, output, *HARD, UNTIL_12, restart=1)
    read_until(process, "step:[    4/")
    os.kill(ranks_of(output)[1], signal.SIGKILL)
    printed = end(process)
    assert "restart 1 of 1: going on from the last good checkpoint" in printed
    assert "resumed from" in printed
    assert_same(trajectory(output), trajectory(single))
    assert all(record["slowest_rank"] in (0, 1) for record in read_lines(output / "metrics.jsonl"))


def ranks_of(output):
    """Process numbers by rank."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes().decode()
            environment = (directory / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if f"--output_dir={output}" in command and "MS_ROLE=MS_WORKER" in environment:
            rank = next(item for item in environment if item.startswith("RANK_ID="))
            found[int(rank.removeprefix("RANK_ID="))] = int(directory.name)
    return found


@pytest.mark.slow
def test_two_processes_resume_bit_identically(config_file, double, tmp_path):
    output = tmp_path / "out"
    end(launch(config_file, output, *HARD, UNTIL_12, f"--resume_training={double}/checkpoint/llm-6"))
    assert trajectory(output) == trajectory(double)[6:12]


@pytest.mark.slow
def test_two_processes_evaluate_a_checkpoint_as_one_does(config_file, single, tmp_path):
    options = ("--run_mode=eval", f"--load_checkpoint={single}/checkpoint/llm-12")
    alone = run(config_file, tmp_path / "one", *options, "--eval_dataset.batch_size=4")
    assert held_out(end(launch(config_file, tmp_path / "two", *options))) == held_out(alone)


def held_out(printed):
    return printed.split("the valid split: ")[1].splitlines()[0]


LATE = """
import time
from mindllm.config import load_config
from mindllm.run.engines import make_engine, set_up_execution, batch_shard
from mindllm.train.job.execution import execution_of
from mindllm.train.batches.datasets import RunData

config = load_config("run.yaml", ["--use_parallel=true", "--parallel_config.data_parallel=2"])
execution = execution_of(config)
set_up_execution(config, execution)
engine, stream = make_engine(config, execution), RunData(config, batch_shard(config, execution)).train_stream()
for step in range(2):
    time.sleep(40 if execution.ranks.is_first and step else 0)
    print(engine.step(stream.batch(step), 1e-3, 1.0).loss)
"""


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(config_file, tmp_path, monkeypatch):
    """Longer than the 30 seconds after which MindSpore's own collective operators give up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(config_file.read_text())
    (tmp_path / "late.py").write_text(LATE)
    command = [sys.executable, "-m", "mindllm.launch", "--workers", "2", "late.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) >= 2


FAULTY = """
import os
import sys
from functools import wraps

sys.path.insert(0, "{root}")
import mindllm.run.training as training
import mindllm.train.engine.replica as replica
import mindllm.data.loader as loader
import mindllm.train.checkpoint.store as store
from mindllm.cli.run import command

owner, name, rank, calls = {fault}


def planted(function):
    @wraps(function)
    def call(*arguments, **options):
        global calls
        calls -= 1
        if calls < 0 and os.environ["RANK_ID"] == rank:
            raise OSError(5, "planted")
        return function(*arguments, **options)

    return call


setattr(owner, name, planted(getattr(owner, name)))
command()
"""
FAULTS = {  # where a call on one rank fails: owner, function, rank, calls that go well before
    "data": '(loader.BatchStream, "batch", "1", 5)',
    "compile": '(training, "make_engine", "1", 0)',
    "step": '(replica.ReplicaEngine, "step", "1", 4)',
    "save": '(store, "publish", "0", 1)',
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", FAULTS)
def test_a_fault_of_one_rank_ends_all_and_loses_no_checkpoint(phase, config_file, single, tmp_path):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY.format(root=ROOT, fault=FAULTS[phase]))
    output = tmp_path / "out"
    process = launch(config_file, output, *HARD, UNTIL_12, program=program)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 1, printed
    saved = {path.name for path in (output / "checkpoint").glob("[!.]*")}
    if phase == "data":
        assert "rank 1 could not make the next batch; see the log of that rank" in printed
        assert "planted" in (tmp_path / "out_log" / "worker_1.log").read_text()
    else:
        assert "planted" in printed
    if phase == "compile":
        assert "rank 1" in printed
        assert not saved
        return
    if phase == "step":
        assert re.search(r"last step of each rank: 4 \(rank", printed), printed
    if phase == "save":
        assert "was not saved" in printed
    assert saved == {"data": {"llm-2", "llm-4", "llm-5"}, "step": {"llm-2", "llm-4"}, "save": {"llm-2"}}[phase]
    run(config_file, output, *HARD, *ONE, UNTIL_12, "--resume_training=auto")
    assert_same(trajectory(output), trajectory(single))


def test_a_wrong_number_of_processes_is_refused(config_file, tmp_path):
    process = launch(config_file, tmp_path / "out", "--parallel_config.data_parallel=4")
    printed = end(process, expect=2)
    assert "describes 4 devices, but 2 processes were started" in printed
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_two_processes_scale_the_heads_that_one_does(config_file, tmp_path):
    """Each has its own largest logits, and both scale by the larger one."""
    clipped = ("--optimizer.type=Muon", "--optimizer.ns_steps=1", "--optimizer.qk_clip_threshold=0.05")
    until = ("--runner_config.stop_step=4", "--do_eval=false")
    one, two = (tmp_path / name for name in ("one", "two"))
    run(config_file, one, *clipped, *until, "--batch_size=2", "--gradient_accumulation_steps=2")
    end(launch(config_file, two, *clipped, *until))
    weights, expected = (load_checkpoint(output / "checkpoint" / "llm-4").weights for output in (two, one))
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)
