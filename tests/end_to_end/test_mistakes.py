"""Mistakes end with exit code 2 and a sentence, failures of the run with 1; never with a traceback."""

import numpy as np
import pytest
from command_line import run

from mindllm.train.checkpoint import CheckpointStore, RankTensors, load_checkpoint


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("--runner_config.batch_sise=4", ["runner_config.batch_sise", "did you mean", "batch_size"]),
        ("--model.model_config.num_heads=5", ["num_heads"]),
        ("--train_dataset.data_loader.config.data_path=nowhere", ["nowhere"]),
        ("--model.model_config.vocab_size=100", ["vocab_size", "512"]),
        ("--optimizer.learning_rate=1", ["lr_schedule.learning_rate"]),
        ("--load_checkpoint=nowhere", ["nowhere"]),
        ("--resume_training", ["has no checkpoint llm-<step>"]),
        ("--lr_schedule.warmup_steps=-1", ["warmup_steps", "-1"]),
    ],
)
def test_wrong_input(config_file, tmp_path, option, wanted):
    printed = run(config_file, tmp_path / "out", option, expect=2)
    assert printed.startswith("error: ")
    for word in wanted:
        assert word in printed
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_weights_of_another_model_are_refused_with_their_names(finished, config_file, tmp_path):
    options = (
        f"--load_checkpoint={finished[0]}/checkpoint/llm-12",
        "--run_mode=eval",
        "--model.model_config.num_layers=1",
    )
    printed = run(config_file, tmp_path / "out", *options, expect=2)
    assert "model.layers.1." in printed


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_parameter(finished, config_file, tmp_path):
    checkpoint = load_checkpoint(finished[0] / "checkpoint" / "llm-12")
    weights = {name: np.array(value) for name, value in checkpoint.weights.items()}
    weights["model.layers.1.feed_forward.w2.weight"][3, 5] = np.nan
    poisoned = CheckpointStore(tmp_path / "poisoned").save(
        12, {0: RankTensors(weights, checkpoint.optimizer)}, checkpoint.state
    )
    options = ("--run_mode=finetune", f"--load_checkpoint={poisoned}", "--do_eval=false")
    printed = run(config_file, tmp_path / "out", *options, expect=1)
    assert "model.layers.1.feed_forward.w2.weight" in printed
    assert "step 1" in printed
