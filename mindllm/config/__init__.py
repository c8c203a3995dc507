"""The typed schema of a run's YAML: strict sections, loading over a base with overrides, rendering, cross checks.

The only room that reads YAML. Start with :func:`load_config`; the root of the schema is :class:`RunConfig`. The YAML's
``model.model_config`` is the attribute ``config.model.config``, because pydantic keeps the name ``model_config`` for itself.

The names below are found when they are first used: families of models read the schema without loading runs, and are read by them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindllm.config.dataset import EvalDatasetConfig, ProcessorConfig, TrainDatasetConfig
    from mindllm.config.generation import GenerationConfig
    from mindllm.config.model import ModelConfig, keys_for_layers
    from mindllm.config.optimizer import LrSchedule, OptimizerConfig, RunnerWrapperConfig
    from mindllm.config.parallel import ParallelConfig, ParallelContextConfig
    from mindllm.config.precision import on_this_device
    from mindllm.config.reading.load import load_config, override_config, render_config, tree_of, with_model
    from mindllm.config.recompute import RecomputeConfig
    from mindllm.config.run import RunConfig
    from mindllm.config.runtime import ContextConfig, ExportConfig, RunnerConfig
    from mindllm.families.hugging_face import (
        config_json,
        is_hugging_face,
        read_generation,
        read_model_config,
        tokenizer_in,
    )

HOMES = {
    "keys_for_layers": "mindllm.config.model",
    "EvalDatasetConfig": "mindllm.config.dataset",
    "ProcessorConfig": "mindllm.config.dataset",
    "TrainDatasetConfig": "mindllm.config.dataset",
    "GenerationConfig": "mindllm.config.generation",
    "load_config": "mindllm.config.reading.load",
    "override_config": "mindllm.config.reading.load",
    "render_config": "mindllm.config.reading.load",
    "tree_of": "mindllm.config.reading.load",
    "with_model": "mindllm.config.reading.load",
    "ModelConfig": "mindllm.config.model",
    "LrSchedule": "mindllm.config.optimizer",
    "OptimizerConfig": "mindllm.config.optimizer",
    "RunnerWrapperConfig": "mindllm.config.optimizer",
    "ParallelConfig": "mindllm.config.parallel",
    "ParallelContextConfig": "mindllm.config.parallel",
    "on_this_device": "mindllm.config.precision",
    "RecomputeConfig": "mindllm.config.recompute",
    "RunConfig": "mindllm.config.run",
    "ContextConfig": "mindllm.config.runtime",
    "ExportConfig": "mindllm.config.runtime",
    "RunnerConfig": "mindllm.config.runtime",
    "config_json": "mindllm.families.hugging_face",
    "is_hugging_face": "mindllm.families.hugging_face",
    "read_generation": "mindllm.families.hugging_face",
    "read_model_config": "mindllm.families.hugging_face",
    "tokenizer_in": "mindllm.families.hugging_face",
}
__all__ = [
    "ContextConfig",
    "EvalDatasetConfig",
    "ExportConfig",
    "GenerationConfig",
    "LrSchedule",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParallelContextConfig",
    "ProcessorConfig",
    "RecomputeConfig",
    "RunConfig",
    "RunnerConfig",
    "RunnerWrapperConfig",
    "TrainDatasetConfig",
    "config_json",
    "is_hugging_face",
    "keys_for_layers",
    "load_config",
    "on_this_device",
    "override_config",
    "read_generation",
    "read_model_config",
    "render_config",
    "tokenizer_in",
    "tree_of",
    "with_model",
]


def __getattr__(name: str) -> Any:
    """Return ``name`` from the module that has it."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
