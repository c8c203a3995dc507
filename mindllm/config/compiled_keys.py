"""The keys that a compiled step depends on: what is kept of one is kept under a name made of them.

Shared by the compiled step on disk, the kept graphs of ranks and the kept simulations of a dry run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindllm.config.run import RunConfig

NOT_COMPILED = (
    "seed",
    "output_dir",
    "load_checkpoint",
    "load_adapter",
    "adapter_id",
    "pretrained_model_dir",
    "resume_training",
    "overwrite",
    "require_proof",
    "do_eval",
    "eval_step_interval",
    "profile",  # and all that begin with it
    "with_stack",
    "trainer.",
    "runner_config.epochs",
    "runner_config.train_steps",
    "runner_config.stop_step",
    "runner_config.step_timeout",
    "runner_config.slow_rank_factor",
    "context.device_id",
    "context.lockstep_step_seconds",
    "context.compile_cache",  # and its path
    "lr_schedule",  # a rate is an input of the step
    "train_dataset.",  # but for the columns of a batch, and pairs of answers
    "preference.",  # unless pairs are learned from
    "eval_dataset.",
    "eval_tasks",
    "evaluation.",
    "processor.",
    "generation.",
    "input_data",
    "predict_batch_size",
    "save_file",
    "export_hf.",
    "callbacks",
    "monitor_config.step_interval",
    "monitor_config.layers_per_group",
)
"""Beginnings of dotted keys that change between starts of one run and leave its step as it is, as a test shows of each."""


def compiled_keys(config: RunConfig) -> dict[str, Any]:
    """Returns all keys of ``config`` by dotted name, but those of :data:`NOT_COMPILED`; of the data what its batches hold.

    A key that is new in the schema counts until it is shown not to.
    """
    pet = config.model.config.pet_config
    constants = pet.tuner.constants if pet is not None else ()
    keys = {
        name: value
        for name, value in flat_keys(config.model_dump(mode="json"))
        if name in constants or not name.startswith(NOT_COMPILED)
    }
    loss = config.preference.model_dump(mode="json") if config.is_preference_tuning else None
    return keys | {"columns": config.train_dataset.document_columns, "pairs": loss}


def flat_keys(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their dotted names; a list, or an empty mapping, is a leaf."""
    if not isinstance(tree, dict) or not tree:
        yield path, tree
        return
    for key, value in tree.items():
        yield from flat_keys(value, f"{path}.{key}" if path else str(key))
