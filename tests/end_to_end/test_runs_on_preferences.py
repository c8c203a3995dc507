"""A run on pairs of answers through the command line: base, DPO, its figures, what it leaves, and going on."""

import json

import pytest
import yaml
from command_line import read_lines, run, trajectory
from test_several_processes import end, launch

from mindllm.cli.view import main as view

PAIRS = [
    {"prompt": f"Import number {i}.", "chosen": f"import module_{i}\n", "rejected": f"from module_{i} import *\n"}
    for i in range(24)
]


@pytest.fixture(scope="module")
def preferences(config_file, finished, tmp_path_factory):
    """The YAML of a short run on pairs, beside the finished run as base."""
    directory = tmp_path_factory.mktemp("preferences")
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    tree = yaml.safe_load(config_file.read_text())
    section = {"data_path": str(directory / "pairs.jsonl"), "split": "5,1"}
    tree["train_dataset"] = {"data_loader": {"type": "PreferenceDataLoader", "config": section}}
    tree["load_checkpoint"] = str(finished[0] / "checkpoint" / "llm-12")
    tree["run_mode"] = "finetune"
    tree["runner_config"] = {"batch_size": 2, "train_steps": 8}
    tree["eval_step_interval"] = 4
    tree["model"]["model_config"] |= {"seq_length": 96, "pet_config": {"lora_rank": 4, "lora_dropout": 0.1}}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.slow
def test_pairs_are_learnt_and_a_stopped_run_repeats_them(preferences, tmp_path, capsys):
    printed = run(preferences, tmp_path / "whole")
    assert "rewards/chosen" in printed
    assert "per pair (4 pairs)" in printed
    records = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert records[-1]["rewards/margins"] > records[0]["rewards/margins"]
    assert records[-1]["rewards/accuracies"] == 1
    assert records[-1]["loss"] < 0.69 < records[0]["loss"]
    evaluations = read_lines(tmp_path / "whole" / "evaluation.jsonl")
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    run(preferences, tmp_path / "out", "--runner_config.stop_step=4")
    run(preferences, tmp_path / "out", "--resume_training")
    assert trajectory(tmp_path / "out") == trajectory(tmp_path / "whole")
    assert read_lines(tmp_path / "out" / "metrics.jsonl")[-1]["rewards/chosen"] == records[-1]["rewards/chosen"]
    assert view(["--config", str(preferences), "--count"]) == 0
    assert "20 pairs" in capsys.readouterr().out
    assert view(["--config", str(preferences), "--json"]) == 0
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines())
    answers = ["".join(part["text"] for part in item["parts"] if part["trained"]) for item in shown["segments"]]
    assert [answer.split()[0] for answer in answers] == ["import", "from"]


def test_the_viewer_tells_the_answer_that_is_compared_from_the_one_that_is_learnt(preferences, capsys):
    options = ["--config", str(preferences), "--preference.loss_type=kto"]
    assert view([*options, "--json"]) == 0
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines())
    learnt, compared = shown["segments"]
    assert (learnt["compared"], compared["compared"]) == (False, True)
    assert shown["trained"] == learnt["trained"] > 0 == compared["trained"]
    assert view(options) == 0
    assert capsys.readouterr().out.count("answer of another row") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "kto"])
def test_replicas_learn_what_one_process_does(preferences, tmp_path, kind):
    short = ("--runner_config.stop_step=5", "--model.model_config.pet_config.lora_dropout=0")
    short = (*short, f"--preference.loss_type={kind}")
    run(preferences, tmp_path / "one", *short)
    end(launch(preferences, tmp_path / "two", *short, "--runner_config.batch_size=1", "--eval_dataset.batch_size=1"))
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert_same(two, one)
    assert kind != "kto" or max(record["kl"] for record in one) > 0.1  # it is estimated, and not always bounded


def assert_same(found, wanted):
    for first, second in zip(wanted, found, strict=True):
        assert first.keys() == second.keys()
        for name in ("loss", "global_norm", "rewards/chosen", "logps/rejected", "kl"):
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "simpo", "kto"])
def test_two_stages_of_a_cluster_on_a_laptop_learn_what_one_device_does(preferences, tmp_path, kind):
    short = ("--runner_config.stop_step=4", f"--preference.loss_type={kind}")
    if kind == "kto":  # of whose loss a micro-batch has a part of its own
        short = (*short, "--runner_config.batch_size=1")
    parts = ("--runner_config.gradient_accumulation_steps=2", "--eval_dataset.max_batches=4") if kind == "kto" else ()
    run(preferences, tmp_path / "one", *short, *parts)
    stages = "--parallel_config={pipeline_stage: 2, micro_batch_num: 2}"
    printed = run(preferences, tmp_path / "two", *short, "--use_parallel=true", "--runner_config.batch_size=1", stages)
    assert "pp 2: all 2 ranks run in lockstep in this process" in printed
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert_same(two, one)
    assert max(record.get("rewards/margins", 0) for record in one) > 0  # of unpaired answers a step may have one kind
    alone, together = (read_lines(tmp_path / name / "evaluation.jsonl")[-1] for name in ("one", "two"))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)
