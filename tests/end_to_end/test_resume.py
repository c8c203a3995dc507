"""Stopped in any way, a run goes on as if it had not been: the losses of all later steps are bit-identical."""

import os
import shutil
import signal
import time

import numpy as np
import pytest
from command_line import STEPS, run, start, trajectory

from mindllm.train.checkpoint import load_checkpoint
from mindllm.train.job.output_directory import RunLock
from mindllm.train.metrics_file import METRICS_NAME, read_metrics


def announced(printed):
    """The checkpoints a process said it had saved."""
    return [line.rsplit(" ", 1)[1] for line in printed.splitlines() if "saved checkpoint" in line]


def read_until(process, text):
    """Reads what a process prints up to a line that holds ``text``."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def rest(process):
    """What it prints until it ends; ``communicate`` would leave out lines that were read ahead with those before."""
    printed = process.stdout.read()
    process.wait(timeout=60)
    return printed


def test_a_run_stopped_at_a_step_resumes_bit_identically(finished, config_file, tmp_path):
    output = tmp_path / "out"
    run(config_file, output, "--runner_config.stop_step=5", "--resume_training=auto")
    assert [record["step"] for record in trajectory(output)] == [1, 2, 3, 4, 5]
    run(config_file, output, "--resume_training=auto")
    assert trajectory(output) == trajectory(finished[0])
    weights = [load_checkpoint(path / "checkpoint" / f"llm-{STEPS}").weights for path in (output, finished[0])]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_sigterm_and_sighup_save_and_end_with_0(finished, config_file, tmp_path, number):
    output = tmp_path / "out"
    process = start(config_file, output, "--callbacks.CheckpointMonitor.async_save=true")
    printed = read_until(process, "step:[    3/")
    process.send_signal(number)
    printed += rest(process)
    assert process.returncode == 0, printed
    step = trajectory(output)[-1]["step"]
    assert announced(printed)[-1].endswith(f"llm-{step}")
    assert "written in the background in" in printed
    run(config_file, output, "--resume_training")
    assert trajectory(output) == trajectory(finished[0])


def test_an_interrupt_ends_cleanly_with_130_and_a_checkpoint(config_file, tmp_path):
    process = start(config_file, tmp_path / "out", "--runner_config.train_steps=100000")
    printed = read_until(process, "step:[    3/")
    process.send_signal(signal.SIGINT)
    printed += rest(process)
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert announced(printed)[-1].endswith(f"llm-{trajectory(tmp_path / 'out')[-1]['step']}")


@pytest.mark.slow
def test_killed_again_and_again_it_loses_nothing_announced(config_file, tmp_path):
    whole, output = tmp_path / "whole", tmp_path / "out"
    steps = "--runner_config.train_steps=100"  # more than a machine does in the moments between start and kill
    run(config_file, whole, steps)
    rng = np.random.default_rng(0)
    for attempt in range(2):
        process = start(config_file, output, steps, *(["--resume_training"] if attempt else []))
        printed = read_until(process, "saved checkpoint")
        time.sleep(float(rng.random()) * 0.3)
        process.kill()
        printed += process.communicate()[0]
        newest = load_checkpoint(output.parent / announced(printed)[-1])
        assert newest.step < 100
    run(config_file, output, steps, "--resume_training")
    assert trajectory(output) == trajectory(whole)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_gone_on_with(finished, config_file, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(finished[0], output)
    victim = output / "checkpoint" / "llm-12" / "model.safetensors"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    printed = run(config_file, output, "--resume_training")
    assert f"{victim} is altered" in printed
    assert "resumed from" in printed
    assert "llm-10 at step 10" in printed
    assert trajectory(output) == trajectory(finished[0])


def test_a_run_is_not_begun_anew_where_another_one_has_left_its_results(finished, config_file):
    before = (finished[0] / "metrics.jsonl").read_bytes()
    printed = run(config_file, finished[0], expect=2)
    assert f"already has results ({STEPS} steps in metrics.jsonl and checkpoint llm-{STEPS})" in printed
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_a_second_trainer_in_the_same_directory_is_refused(config_file, tmp_path):
    lock = RunLock(tmp_path / "out")
    lock.acquire()
    printed = run(config_file, tmp_path / "out", "--resume_training=auto", expect=2)
    lock.release()
    assert f"is in use: process {os.getpid()} on " in printed
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_run_whose_last_checkpoint_cannot_be_saved_ends_with_1(config_file, tmp_path):
    """No file may grow beyond 60 kB: metrics and logs fit, checkpoints do not."""
    output = tmp_path / "out"
    process = start(config_file, output, "--context.compile_cache=false", limit=60_000)
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 1, printed
    assert "Traceback" not in printed
    assert f"error: {output}/checkpoint/llm-{STEPS} was not saved: File too large" in printed
    assert "Free some space" in printed
    assert [record["step"] for record in trajectory(output)] == list(range(1, STEPS + 1))


def test_resuming_a_finished_run_does_nothing(finished, config_file, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(finished[0], output)
    before = (output / "metrics.jsonl").read_bytes()
    assert "nothing to do" in run(config_file, output, "--resume_training")
    assert (output / "metrics.jsonl").read_bytes() == before


SPIKES = "--runner_wrapper.skip_spikes={window: 4, deviations: 0.8, stop_after: %d}"


WATCHED = (
    "--monitor_config={monitor_on: true, local_norm_format: log, max_attention_logit_format: log, step_interval: 2}"
)


def test_a_run_that_skips_spikes_resumes_bit_identically_and_skips_the_same(config_file, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = run(config_file, whole, SPIKES % 0, WATCHED)
    skipped = [record["step"] for record in read_metrics(whole / METRICS_NAME) if record["skipped"]]
    assert skipped
    assert all(f"step {step} skipped as a spike: " in printed for step in skipped)
    run(config_file, parts, SPIKES % 0, WATCHED, f"--runner_config.stop_step={skipped[0]}", "--resume_training=auto")
    run(config_file, parts, SPIKES % 0, WATCHED, "--resume_training=auto")
    assert trajectory(parts) == trajectory(whole)
    records = [read_metrics(output / METRICS_NAME) for output in (parts, whole)]
    assert [record["step"] for record in records[0] if record["skipped"]] == skipped
    health = [{item["step"]: item["health"] for item in each if item["step"] % 2 == 0} for each in records]
    assert health[0] == health[1]
    assert sum("{ grad_norm: embedding " in line for line in printed.splitlines()) == len(health[1])
    assert all(record["data_wait_s"] >= 0 for record in records[0])


@pytest.mark.slow
def test_too_many_spikes_in_a_row_end_the_run_with_1(config_file, tmp_path):
    printed = run(config_file, tmp_path / "out", SPIKES.replace("0.8", "0.0001") % 2, expect=1)
    assert "2 steps in a row were skipped as spikes (runner_wrapper.skip_spikes.stop_after 2)" in printed
