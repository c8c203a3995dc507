"""What is said when a run has ended, and how several devices are started: without running anything."""

import pytest
from run_fixtures import MINIMAL

from mindllm.cli.train import launch_line, next_steps
from mindllm.config import load_config
from mindllm.process.interrupts import INTERRUPTED
from mindllm.train.checkpoint import CheckpointStore

LORA = {"model.model_config.pet_config.lora_rank": 4}
BOTTLENECK = {"model.model_config.pet_config.pet_type": "bottleneck", "model.model_config.pet_config.adapter_length": 8}


@pytest.fixture
def newest(tmp_path, monkeypatch):
    """A last checkpoint of a run in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CheckpointStore, "newest", lambda self: self.directory / "llm-6")
    return tmp_path / "my run"


def lines(output, changes=(), code=0, verb="finetune"):
    return list(next_steps(load_config(MINIMAL, {"output_dir": str(output), **dict(changes)}), verb, code))


def test_an_adapter_is_chatted_with_exported_and_merged(newest):
    assert lines(newest, LORA) == [
        "chat: mindllm chat 'my run'",
        "export the adapter for PEFT: mindllm weights adapter 'my run/checkpoint/llm-6' DIR",
        "merge with the base into a Hugging Face directory: mindllm weights merge 'my run/checkpoint/llm-6' DIR",
    ]


def test_bottlenecks_are_never_merged_and_whole_models_exported(newest):
    assert [line.partition(": ")[0] for line in lines(newest, BOTTLENECK)] == ["chat", "export the adapter"]
    said = lines(newest, verb="pretrain")
    assert said[0] == "generate: mindllm generate 'my run' --prompt \"…\""
    assert said[1].endswith("mindllm weights export 'my run/checkpoint/llm-6' DIR")


def test_a_run_that_was_interrupted_goes_on_and_one_that_failed_says_nothing(newest, tmp_path, write):
    config = load_config(write(MINIMAL), {"output_dir": str(newest)})
    assert list(next_steps(config, "finetune", INTERRUPTED)) == ["resume: mindllm finetune run.yaml --resume_training"]
    assert lines(newest, LORA, code=1) == []


def test_a_run_without_a_checkpoint_says_nothing(tmp_path):
    assert lines(tmp_path, LORA) == []


def test_several_devices_are_started_by_the_launcher(write, monkeypatch):
    monkeypatch.delenv("MS_WORKER_NUM", raising=False)
    changes = {"use_parallel": True, "parallel_config.data_parallel": 8, "context.device_target": "Ascend"}
    path = write(MINIMAL)
    line = launch_line(load_config(path, changes), "finetune")
    assert line.endswith(f"mindllm launch --workers 8 'finetune --config {path}'")
    assert launch_line(load_config(path), "finetune") == ""
    monkeypatch.setenv("MS_WORKER_NUM", "8")
    assert launch_line(load_config(path, changes), "finetune") == ""
