"""The sides of the benchmark of evaluation: each answers all questions of a task whenever it is told to, and says its score."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindllm.errors import RunFailed
from toolkit.benchmark.side import serve

Sizes = dict[str, Any]
Ask = Callable[[], Any]  # returns a model of the harness that has answered nothing yet


def mindllm_side(sizes: Sizes) -> Ask:
    """The adapter of :mod:`mindllm.evaluate`."""
    import mindspore as ms

    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    from mindllm.evaluate.load import evaluated_model
    from mindllm.evaluate.model import EvaluatedModel
    from mindllm.recipes.model_source import find_model
    from mindllm.recipes.using import evaluate_recipe

    recipe = evaluate_recipe(find_model(sizes["model"]), "", Path(), ["arc_easy"], {"batch_size": sizes["batch"]})
    config = recipe.made().config
    generator = evaluated_model(config, None).generator

    def fresh() -> EvaluatedModel:
        generator.forget()
        return EvaluatedModel(generator, sizes["batch"])

    return fresh


def hf_side(sizes: Sizes) -> Ask:
    """The harness's own class for models of Hugging Face."""
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(sizes["threads"])
    model = HFLM(
        pretrained=sizes["model"],
        device="cpu",
        dtype="float32",
        batch_size=sizes["batch"],
        max_length=sizes["max_length"],
    )
    return lambda: model


def asked(build: Callable[[Sizes], Ask]) -> Callable[[Sizes], Callable[[], dict[str, Any]]]:
    """Makes of a side one whose rounds evaluate the task, and answer with seconds, those of processors, and the scores.

    What the harness does once for each evaluation whatever the model, looking at the machine and at git, is left out.
    """

    def side(sizes: Sizes) -> Callable[[], dict[str, Any]]:
        from mindllm.evaluate.local_data import OFFLINE

        os.environ.update(dict.fromkeys(OFFLINE, "1"), HF_DATASETS_CACHE=str(Path(sizes["data"]) / "cache"))
        from mindllm.config.generation import EvaluationConfig
        from mindllm.evaluate.run import evaluate_tasks, find_tasks

        options = EvaluationConfig(
            data=sizes["data"],
            limit=sizes["questions"],
            num_fewshot=sizes["shots"],
            gen_kwargs={"max_gen_toks": sizes["new"]},
        )
        manager = find_tasks([sizes["task"]], options)
        fresh = build(sizes)

        def round_() -> dict[str, Any]:
            start, processor = time.perf_counter(), time.process_time()
            outcome = evaluate_tasks(fresh(), [sizes["task"]], options, manager)
            seconds, processor = time.perf_counter() - start, time.process_time() - processor
            if outcome.failures:
                raise RunFailed(outcome.failures[sizes["task"]])
            return {"seconds": seconds, "processor": processor, "scores": outcome.scores()[sizes["task"]]}

        return round_

    return side


SIDES = {"mindllm": asked(mindllm_side), "hf": asked(hf_side)}

if __name__ == "__main__":
    serve(SIDES)
