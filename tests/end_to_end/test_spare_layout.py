"""A job of two nodes that loses one goes on in the layout for one node, as a run that was never interrupted."""

import os
import subprocess
import sys
import time

import pytest
import yaml
from command_line import ROOT, run, trajectory

from mindllm.launch.layouts import LayoutBook

LAST = 20  # at this rate rounding grows: at step 40 four ranks that lost nobody are 2.6e-4 from one process, too
ONE = {"batch_size": 2, "gradient_accumulation_steps": 2, "stop_step": LAST}
WHOLE = {"batch_size": 1}
SPARE = {"batch_size": 1, "gradient_accumulation_steps": 2, "stop_step": LAST}


def layout(config_file, path, devices, runner):
    """Writes the run for so many data parallel devices, with four sequences a step."""
    tree = yaml.safe_load(config_file.read_text())
    tree |= {"use_parallel": devices > 1, "parallel_config": {"data_parallel": devices}}
    tree["runner_config"] |= {"train_steps": 100000, **runner}
    tree["lr_schedule"]["total_steps"] = 100
    tree["eval_dataset"]["batch_size"] = 4 // devices
    path.write_text(yaml.safe_dump(tree))
    return path


def node(number, book, output, log, port):
    """Starts the launcher of a node with two ranks."""
    words = [ROOT / "run_llm.py", "--config", book.layouts[4], f"--output_dir={output}"]
    command = [sys.executable, "-m", "mindllm.launch", "--workers=4", "--local_workers=2", "--master_addr=127.0.0.1"]
    command += [f"--port={port}", f"--node_rank={number}", f"--log_dir={log}", "--restart=1", "--patience=1"]
    return subprocess.Popen(
        [*command, f"--book={book.path}", " ".join(f"'{word}'" for word in words)],
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
    layouts = {
        devices: layout(config_file, tmp_path / f"for_{devices}.yaml", devices, runner)
        for devices, runner in ((4, WHOLE), (2, SPARE), (1, ONE))
    }
    one = layouts.pop(1)
    (book := LayoutBook(tmp_path / "book.yaml", 2, 4, layouts)).write()
    nodes = [node(number, book, output, tmp_path / f"log_{number}", port) for number in range(2)]
    try:
        wait_for_steps(nodes, output / "metrics.jsonl", 5)
        nodes[1].kill()
        told = [launcher.communicate(timeout=200)[0] for launcher in nodes]
    finally:
        for launcher in nodes:
            launcher.kill()
    assert nodes[0].returncode == 0, told[0]
    assert "was lost with its node" in told[0]
    assert "not waiting for node 1: the layout for 2 devices is started" in told[0]
    run(one, alone)
    mine, theirs = trajectory(output), trajectory(alone)
    assert [record["step"] for record in mine] == [*range(1, LAST + 1)]
    assert [record["loss"] for record in mine] == pytest.approx([record["loss"] for record in theirs], abs=1e-5)


def test_a_book_that_options_of_the_command_contradict_is_refused(config_file, tmp_path, port):
    layouts = {4: layout(config_file, tmp_path / "for_4.yaml", 4, WHOLE)}
    (book := LayoutBook(tmp_path / "book.yaml", 2, 8, layouts)).write()
    launcher = node(0, book, tmp_path / "out", tmp_path / "log", port)
    printed, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 2, printed
    assert f"{layouts[4]} has 4 sequences per step, but the book 8" in printed
