"""Adapters from training to a conversation by command: on a cluster on a laptop, then on one device, then merged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import ROOT, read_lines, run

CHATS = [{"instruction": f"Import number {i}.", "output": f"import module_{i}\n"} for i in range(24)]
CLUSTER = (
    "--use_parallel=true",
    "--batch_size=2",
    "--parallel_config.data_parallel=2",
    "--parallel_config.model_parallel=2",
)
ANSWER = "--generation.max_new_tokens=4"
OF_BASE = "--model.model_config.seq_length=32"  # what is merged has the positions of its base


@pytest.fixture(scope="module")
def tuned(config_file, finished, tmp_path_factory):
    """The YAML of a run that trains adapters beside the finished run, on packed conversations."""
    directory = tmp_path_factory.mktemp("tuned")
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    tree = yaml.safe_load(config_file.read_text())
    section = {"data_path": str(directory / "chats.jsonl"), "split": "5,1", "packing": True}
    tree["train_dataset"] = {"data_loader": {"type": "CommonDataLoader", "config": section}}
    tree |= {"run_mode": "finetune", "load_checkpoint": str(finished[0] / "checkpoint" / "llm-12")}
    tree["runner_config"] = {"batch_size": 4, "train_steps": 6}
    tree["lr_schedule"] = {"type": "ConstantWarmUpLR", "learning_rate": 1e-2}
    tree["model"]["model_config"] |= {"seq_length": 96, "pet_config": {"lora_rank": 4}}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def command(*words):
    """Runs a command of a user to a good end and returns what it printed."""
    environment = {**os.environ, "GLOG_v": "3", "COLUMNS": "250", "VIRTUAL_ENV": sys.prefix}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=environment, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_adapters_of_a_cluster_go_on_on_one_device_and_are_merged_and_talked_to(tuned, finished, tmp_path):
    base, output = finished[0] / "checkpoint" / "llm-12", tmp_path / "out"
    words = " ".join(map(str, (ROOT / "run_llm.py", "--config", tuned, f"--output_dir={output}", *CLUSTER)))
    launcher = ["bash", ROOT / "scripts" / "msrun_launcher.sh"]
    printed = command(*launcher, f"{words} --runner_config.stop_step=3", "1", "0", tmp_path / "log")
    assert "dp 2 x tp 2 x pp 1: all 4 ranks run in lockstep in this process" in printed
    run(tuned, output, "--resume_training")
    run(tuned, tmp_path / "alone")
    found, wanted = (read_lines(directory / "metrics.jsonl") for directory in (output, tmp_path / "alone"))
    assert [record["loss"] for record in found] == pytest.approx([record["loss"] for record in wanted], rel=1e-4)
    last = output / "checkpoint" / "llm-6"
    tool = (sys.executable, "-m", "mindllm.main", "weights")
    command(*tool, "adapter", last, tmp_path / "adapter")
    command(*tool, "merge", tmp_path / "adapter", tmp_path / "merged", "--base", base)
    ways = (
        (f"--load_checkpoint={last}",),
        (f"--load_checkpoint={tmp_path / 'merged'}",),
        (f"--load_checkpoint={base}", f"--load_adapter={tmp_path / 'adapter'}"),
    )
    spoken = [
        run(tuned, tmp_path / "chat", "--run_mode=chat", ANSWER, OF_BASE, *way, typed="Import number 3.\nq\n")
        for way in ways
    ]
    assert len({answer_in(text) for text in spoken}) == 1
    losses = [
        run(tuned, tmp_path / "eval", "--run_mode=eval", *way).rpartition("loss: ")[2].split()[0]
        for way in (ways[0], ways[2])
    ]
    assert len(set(losses)) == 1


def answer_in(printed):
    """What the model said: the last lines of a chat but those with its speed."""
    speeds = ("prefill: ", "decode: ", "compilation: ")
    return [line for line in printed.splitlines() if line.strip() and not any(word in line for word in speeds)][-1]
