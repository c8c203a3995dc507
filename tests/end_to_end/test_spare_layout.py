"""A job of two nodes that loses one goes on in the layout for one node, as a run that was never interrupted."""

import os
import subprocess
import sys
import time

import pytest
from command_line import ROOT, run, trajectory

LONG = ("--runner_config.train_steps=100000", "--lr_schedule.total_steps=100")
ALIKE = ("--use_parallel=true", "--batch_size=1", "--eval_dataset.batch_size=1")
WHOLE = (*ALIKE, "--parallel_config.data_parallel=4")
SPARE = (*ALIKE, "--parallel_config.data_parallel=2", "--gradient_accumulation_steps=2")
LAST = 20  # at this rate rounding grows: at step 40 four ranks that lost nobody are 2.6e-4 from one process, too
UNTIL = f"--runner_config.stop_step={LAST}"


def node(config_file, output, log, options, *layout):
    """Starts the launcher of a node with two ranks."""
    words = [ROOT / "run_llm.py", "--config", config_file, f"--output_dir={output}", *LONG, *options]
    command = [sys.executable, "-m", "mindllm.launch", "--local_workers", "2", "--log_dir", log, *map(str, layout)]
    return subprocess.Popen(
        [*command, " ".join(f"'{word}'" for word in words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=output.parent,
    )


def wait_for_steps(nodes, metrics, count):
    """Until the job has logged so many steps."""
    deadline = time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count('"loss"') < count:
        assert time.monotonic() < deadline, f"no {count} steps in 200 s"
        assert all(launcher.poll() is None for launcher in nodes), "the job ended by itself"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_job_that_lost_a_node_goes_on_in_the_layout_of_one(config_file, tmp_path, port):
    output, alone = tmp_path / "out", tmp_path / "alone"
    meet = ("--workers", 4, "--master_addr", "127.0.0.1", "--port", port, "--shared_dir", tmp_path)
    nodes = [node(config_file, output, tmp_path / f"log_{n}", WHOLE, *meet, "--node_rank", n) for n in range(2)]
    try:
        wait_for_steps(nodes, output / "metrics.jsonl", 5)
        nodes[1].kill()
        told = [launcher.communicate(timeout=100)[0] for launcher in nodes]
    finally:
        for launcher in nodes:
            launcher.kill()
    assert "was lost with its node" in told[0]
    assert trajectory(output)[-1]["step"] < LAST
    spare = node(config_file, output, tmp_path / "log_2", (*SPARE, UNTIL, "--resume_training=auto"), "--workers", 2)
    printed, _ = spare.communicate(timeout=200)
    assert spare.returncode == 0, printed
    one = ("--batch_size=2", "--gradient_accumulation_steps=2", "--eval_dataset.batch_size=4")
    run(config_file, alone, *LONG, *one, UNTIL)
    mine, theirs = trajectory(output), trajectory(alone)
    assert [record["step"] for record in mine] == [*range(1, LAST + 1)]
    assert [record["loss"] for record in mine] == pytest.approx([record["loss"] for record in theirs], abs=1e-5)
