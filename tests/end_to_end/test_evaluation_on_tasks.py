"""Public tasks through the command lines: a YAML of run mode eval, several processes, a checkpoint in parts, a training run."""

import json

import pytest
import yaml

pytest.importorskip("lm_eval")

from command_line import STEPS, read_lines, run
from test_several_processes import end, launch
from tiny_hub import write_data

SHARDED = (
    "--use_parallel=true",
    "--parallel_config.data_parallel=2",
    "--parallel_config.model_parallel=2",
    "--parallel.enable_parallel_optimizer=true",
)


@pytest.fixture(scope="module")
def eval_file(config_file, tmp_path_factory):
    """The YAML of the run with what evaluates it."""
    directory = tmp_path_factory.mktemp("tasks")
    content = yaml.safe_load(config_file.read_text())
    content |= {
        "run_mode": "eval",
        "eval_tasks": ["arc_easy", "modellink_boolq"],
        "evaluation": {"data": str(write_data(directory / "hub")), "num_fewshot": 0, "batch_size": 4},
    }
    path = directory / "eval.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(directory / "cache"))
        yield path


@pytest.fixture(scope="module")
def alone(eval_file, finished, tmp_path_factory):
    """The evaluation of the run's last checkpoint by one process: (output directory, what it printed, its scores)."""
    output = tmp_path_factory.mktemp("alone") / "out"
    printed = run(eval_file, output, f"--load_checkpoint={last(finished)}")
    return output, printed, results(output)["tasks"]


def last(finished):
    return finished[0] / "checkpoint" / f"llm-{STEPS}"


def results(output):
    return json.loads((output / "evaluation" / "results.json").read_text())


def answered(output):
    """How many answers each process wrote, in the order of ranks."""
    files = sorted((output / "evaluation" / "answers").glob("*/rank_*.jsonl"))
    return [len([line for line in path.read_text().splitlines() if line]) for path in files]


def test_a_yaml_evaluates_on_tasks(alone):
    output, printed, scores = alone
    assert "|arc_easy" in printed
    assert set(scores) == {"arc_easy", "modellink_boolq"}
    assert all(0 <= value <= 1 for found in scores.values() for value in found.values())
    assert "<h1>Wrong answers of " in (output / "evaluation" / "wrong_answers.html").read_text()


def test_processes_share_the_requests(alone, eval_file, finished, tmp_path):
    output = tmp_path / "out"
    printed = end(launch(eval_file, output, f"--load_checkpoint={last(finished)}"))
    assert results(output)["tasks"] == alone[2]
    mine, theirs = answered(output)
    assert min(mine, theirs) > 0
    assert mine + theirs == sum(answered(alone[0]))
    assert printed.count("|arc_easy") == 1


def test_an_evaluation_again_asks_nothing_again_and_a_failed_task_is_named(alone, eval_file, finished):
    output, _, scores = alone
    before = answered(output)
    options = (f"--load_checkpoint={last(finished)}", "--eval_tasks=[arc_easy, piqa]", "--evaluation.log_samples=true")
    printed = run(eval_file, output, *options, expect=1)
    assert "error: task piqa failed: the data set baber/piqa is not in " in printed
    assert "|arc_easy" in printed
    assert answered(output) == before
    assert results(output)["tasks"] == {"arc_easy": scores["arc_easy"]}
    assert len(read_lines(output / "evaluation" / "samples_arc_easy.jsonl")) == 5


@pytest.mark.slow
def test_a_cluster_on_a_laptop_is_evaluated_while_it_trains_and_its_checkpoint_in_parts_after(eval_file, tmp_path):
    hub = yaml.safe_load(eval_file.read_text())["evaluation"]["data"]
    content = yaml.safe_load(eval_file.read_text())
    monitor = {"type": "EvalTasks", "tasks": ["arc_easy"], "eval_steps": 2, "data": hub, "num_fewshot": 0}
    content |= {"run_mode": "train", "eval_tasks": [], "callbacks": [*content["callbacks"], monitor]}
    train_file = tmp_path / "train.yaml"
    train_file.write_text(yaml.safe_dump(content))
    output = tmp_path / "out"
    run(train_file, output, *SHARDED, "--runner_config.stop_step=2")
    (line,) = read_lines(output / "task_scores.jsonl")
    checkpoint = output / "checkpoint" / "llm-2"
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 1
    for options in (SHARDED, ()):
        run(eval_file, tmp_path / "eval", *options, f"--load_checkpoint={checkpoint}", "--eval_tasks=[arc_easy]")
        found = results(tmp_path / "eval")["tasks"]["arc_easy"]
        assert {f"arc_easy/{name}": value for name, value in found.items()} == line["scores"]


@pytest.mark.slow
def test_processes_that_train_evaluate_on_tasks_together(eval_file, tmp_path):
    content = yaml.safe_load(eval_file.read_text())
    monitor = {"type": "EvalTasks", "tasks": ["arc_easy"], "eval_steps": 2, **content["evaluation"]}
    content |= {"run_mode": "train", "eval_tasks": [], "callbacks": [monitor, *content["callbacks"]]}
    train_file = tmp_path / "train.yaml"
    train_file.write_text(yaml.safe_dump(content))
    output = tmp_path / "out"
    end(launch(train_file, output, "--runner_config.stop_step=4"))
    lines = read_lines(output / "task_scores.jsonl")
    assert [line["step"] for line in lines] == [2, 4]
    metrics = read_lines(output / "metrics.jsonl")
    assert [record.get("scores") for record in metrics] == [None, lines[0]["scores"], None, lines[1]["scores"]]
    assert not list(output.glob(".task_answers_*"))
