"""The adapter beside the harness's own class for Hugging Face models, on the same directory: every answer and every score."""

import json
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from tiny_model import LENGTH, write_model  # noqa: E402

from mindllm.evaluate.load import evaluated_model  # noqa: E402
from mindllm.evaluate.local_data import local_data  # noqa: E402
from mindllm.recipes.model_source import find_model  # noqa: E402
from mindllm.recipes.using import evaluate_recipe  # noqa: E402

FOLDERS = ["arc", "mmlu/default", "gsm8k", "wikitext"]
TASKS = ["arc_easy", "mmlu_abstract_algebra", "gsm8k", "wikitext"]
WITHIN = 1e-4  # of a log-likelihood, of nats or of itself


@pytest.fixture(scope="module")
def manager():
    tasks = Path(lm_eval.tasks.__file__).parent  # all of them take ten seconds to find
    return TaskManager(include_defaults=False, include_path=[str(tasks / name) for name in FOLDERS])


def run(model, hub, manager, **options):
    with local_data(hub):
        return simple_evaluate(
            model=model,
            tasks=TASKS,
            num_fewshot=2,
            task_manager=manager,
            gen_kwargs={"max_gen_toks": 12},
            bootstrap_iters=0,
            **options,
        )


def compare(name, tmp_path, hub, manager):
    directory = write_model(tmp_path / "model", name)
    settings = json.loads((directory / "generation_config.json").read_text()) | {"repetition_penalty": 1.5}
    (directory / "generation_config.json").write_text(json.dumps(settings))  # `hf` applies it
    config = evaluate_recipe(find_model(directory), "", tmp_path, TASKS, {"batch_size": 4}).made().config
    assert config.model.config.seq_length == LENGTH
    ours = run(evaluated_model(config, None), hub, manager)
    theirs = run(
        HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=2, max_length=LENGTH), hub, manager
    )
    for task, samples in theirs["samples"].items():
        for mine, other in zip(ours["samples"][task], samples, strict=True):
            assert mine["arguments"] == other["arguments"]
            for mine_answer, answer in zip(mine["resps"], other["resps"], strict=True):
                assert as_answer(mine_answer[0]) == as_answer(answer[0])
    mine, other = ours["results"], theirs["results"]
    assert {task: pytest.approx(scores(found), rel=WITHIN) for task, found in other.items()} == {
        task: scores(found) for task, found in mine.items()
    }


def as_answer(answer):
    """A number is equal to one that is as near as both may be."""
    if isinstance(answer, tuple | list):
        return [as_answer(item) for item in answer]
    return pytest.approx(answer, abs=WITHIN, rel=WITHIN) if isinstance(answer, float) else answer


def scores(found):
    return {name: value for name, value in found.items() if isinstance(value, float)}


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_answers_and_scores_are_those_of_the_harness(name, tmp_path, hub, manager):
    compare(name, tmp_path, hub, manager)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma", "glm", "bloom", "gpt2"])
def test_answers_and_scores_of_other_families(name, tmp_path, hub, manager):
    compare(name, tmp_path, hub, manager)
