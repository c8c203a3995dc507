"""Keys that a compiled step depends on. Caches of the step use them as their key.

The compile cache on disk, cached graphs of ranks and cached simulations of a dry run share them.
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
    "profile",  # a prefix of several keys
    "with_stack",
    "trainer.",
    "runner_config.epochs",
    "runner_config.train_steps",
    "runner_config.stop_step",
    "runner_config.step_timeout",
    "runner_config.slow_rank_factor",
    "context.device_id",
    "context.lockstep_step_seconds",
    "context.compile_cache",  # a prefix of its path
    "lr_schedule",  # a rate is an input of the step
    "train_dataset.",  # except the columns of a batch and preference pairs
    "preference.",  # unless the run is preference tuning
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
"""Prefixes of dotted keys that do not change the compiled step. A test covers each of them."""


def compiled_keys(config: RunConfig) -> dict[str, Any]:
    """Return the keys of ``config`` that change the compiled step, by dotted name.

    These are all keys except :data:`NOT_COMPILED`, so a new key of the schema counts until a test shows that it has no effect. Of
    the data, the columns of a batch count.
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
    """Yield the leaves of nested mappings with their dotted names. Lists and empty mappings are leaves."""
    if not isinstance(tree, dict) or not tree:
        yield path, tree
        return
    for key, value in tree.items():
        yield from flat_keys(value, f"{path}.{key}" if path else str(key))
