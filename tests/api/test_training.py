"""Training, generating and evaluating from Python: in processes of their own, with losses, texts and scores as results."""

from __future__ import annotations

import json
import sys

import pytest

import mindllm

SMALL = {
    "model.model_config.hidden_size": 32,
    "model.model_config.intermediate_size": 88,
    "model.model_config.num_layers": 2,
    "model.model_config.num_heads": 4,
    "model.model_config.n_kv_heads": 2,
    "model.model_config.vocab_size": 512,
    "model.model_config.seq_length": 32,
    "runner_config.train_steps": 3,
    "eval_step_interval": 3,
    "eval_dataset.max_batches": 2,
    "context.enable_graph_kernel": False,
}


@pytest.fixture(scope="module")
def run(workplace):
    """The shipped tiny run, still smaller."""
    data = workplace / "data" / "stdlib"
    files = {"processor.tokenizer.vocab_file": str(data / "tokenizer.json"), "output_dir": str(workplace / "out")}
    corpus = {"train_dataset.data_loader.config.data_path": str(data / "corpus")}
    return mindllm.load_config("configs/llama2/pretrain_llama2_tiny.yaml", {**SMALL, **files, **corpus})


@pytest.fixture(scope="module")
def trained(run):
    """The run, trained, with what it told while it was."""
    told = []
    return mindllm.train(run, progress=lambda what, done=0, total=None: told.append((what, done, total))), told


def test_training_returns_losses_and_the_last_checkpoint(run, trained):
    result, told = trained
    assert result.steps == len(result.losses) == 3
    assert all(loss > 0 for loss in result.losses)
    assert result.checkpoint == result.output_dir / "checkpoint" / "llm-3"
    assert result.checkpoint.is_dir()
    assert told[-1] == ("training", 3, 3)
    assert "3 steps" in str(result)
    assert json.loads(json.dumps(result.to_dict()))["losses"] == list(result.losses)


def test_results_of_another_run_are_an_error_that_says_what_to_do(run, trained):
    with pytest.raises(mindllm.UserError, match=r"already has results .*--overwrite"):
        mindllm.train(run)


def test_a_program_may_train_again(run, trained):
    again = mindllm.train(mindllm.load_config(run, {"output_dir": f"{run.output_dir}_again"}))
    assert again.losses == trained[0].losses


def test_the_loss_of_held_out_text(run, trained):
    found = mindllm.evaluate(run, load_checkpoint=trained[0].checkpoint)
    assert found.loss == pytest.approx(found.values["loss"])
    assert 0 < found.loss < 20
    assert found.to_dict()["split"] == "valid"
    assert f"loss: {found.loss:.4f} nats/token" in str(found)


def test_prompts_are_continued(run, trained):
    weights = trained[0].checkpoint
    found = mindllm.generate(run, ["def main(", "import "], load_checkpoint=weights, max_new_tokens=4)
    assert len(found.texts) == 2
    assert [len(record["continuations"][0]["tokens"]) for record in found.records] == [4, 4]
    assert found.table().rows[0][0].plain == "def main("
    assert found.to_dict()["results"][1]["prompt"] == "import "


def test_an_unknown_option_of_generation_is_an_error_with_its_parts(run):
    with pytest.raises(mindllm.UserError) as refused:
        mindllm.generate(run, "def", max_new_token=4)
    assert refused.value.key == "generation.max_new_token"
    assert refused.value.advice == "did you mean 'max_new_tokens'?"


def test_mindspore_is_imported_in_the_child_alone(trained):
    """Unless another test of this process has."""
    import subprocess

    code = (
        "import sys, mindllm; import mindllm.run.outcome, mindllm.generate.outcome, mindllm.evaluate.outcome; "
        "sys.exit('mindspore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_without_weights_cannot_be_evaluated(run):
    with pytest.raises(mindllm.UserError, match="load_checkpoint"):
        mindllm.evaluate(run)


def test_scores_of_public_tasks(run, trained, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from tiny_hub import write_data

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    weights = trained[0].checkpoint
    options = {"data": str(write_data(tmp_path / "hub")), "num_fewshot": 0, "limit": 4}
    found = mindllm.evaluate(str(weights), tasks=["arc_easy"], output=tmp_path / "scores", **options)
    assert 0 <= found.scores["arc_easy"]["acc"] <= 1
    assert [row[0].plain for row in found.table().rows] == ["arc_easy"] * len(found.scores["arc_easy"])
    with pytest.raises(mindllm.UserError, match="no such task"):
        mindllm.evaluate(run, tasks=["no_task"], load_checkpoint=weights, data=options["data"])
