"""The typed schema of a run's YAML: strict sections, loading over a base with overrides, rendering, cross checks.

The only room that reads YAML. Start with :func:`load_config`; the root of the schema is :class:`RunConfig`. The YAML's
``model.model_config`` is the attribute ``config.model.config``, because pydantic keeps the name ``model_config`` for itself.
"""

from mindllm.config.architecture_keys import keys_of_layers
from mindllm.config.dataset import EvalDatasetConfig, ProcessorConfig, TrainDatasetConfig
from mindllm.config.generation import GenerationConfig
from mindllm.config.load import load_config, override_config, render_config, with_model
from mindllm.config.model import ModelConfig
from mindllm.config.optimizer import LrSchedule, OptimizerConfig, RunnerWrapperConfig
from mindllm.config.parallel import ParallelConfig, ParallelContextConfig
from mindllm.config.precision import on_this_device
from mindllm.config.recompute import RecomputeConfig
from mindllm.config.run import RunConfig
from mindllm.config.runtime import ContextConfig, ExportConfig, RunnerConfig
from mindllm.families.hugging_face import config_json, is_hugging_face, read_model_config

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
    "keys_of_layers",
    "load_config",
    "on_this_device",
    "override_config",
    "read_model_config",
    "render_config",
    "with_model",
]
