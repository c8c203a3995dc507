"""Sections ``callbacks`` and ``monitor_config``: logging, checkpoints, evaluation and figures of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindllm.config.generation import EvaluationConfig
from mindllm.config.section import List, PositiveInt, Section


class LossMonitorConfig(Section):
    """The loss line of the log."""

    type: Literal["MFLossMonitor"] = Field(description="Prints the loss line.")
    per_print_times: PositiveInt = Field(default=1, description="Steps between two lines.")


class MetricsMonitorConfig(Section):
    """The file of metrics."""

    type: Literal["MetricsMonitor"] = Field(description="Writes `{output_dir}/metrics.jsonl`, one object per step.")
    expert_load_steps: PositiveInt = Field(
        default=1,
        description="Steps between two records of the tokens that each expert received, in models with experts.",
    )


class SummaryMonitorConfig(Section):
    """MindSpore summary files."""

    type: Literal["SummaryMonitor"] = Field(description="Writes MindSpore summary files for a dashboard.")
    summary_dir: str = Field(default="", description="Directory; empty: `{output_dir}/summary`.")
    collect_freq: PositiveInt = Field(default=1, description="Steps between two records.")


class TensorBoardConfig(Section):
    """TensorBoard's event files, which other tools read, too."""

    type: Literal["TensorBoard"] = Field(
        description="Writes TensorBoard event files; pip install 'mindllm[tensorboard]'."
    )
    log_dir: str = Field(default="", description="Directory; empty: `{output_dir}/tensorboard`.")
    collect_freq: PositiveInt = Field(default=1, description="Steps between two records.")


class WandbConfig(Section):
    """A run of Weights & Biases."""

    type: Literal["Wandb"] = Field(description="Logs to Weights & Biases; pip install 'mindllm[wandb]'.")
    project: str = Field(default="mindllm", min_length=1, description="Project name.")
    name: str = Field(default="", description="Name of the run; empty: `trainer.model_name`.")
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="offline: writes to `{output_dir}/wandb`, for `wandb sync` to upload; online: uploads each record, "
        "with the complete configuration.",
    )
    collect_freq: PositiveInt = Field(default=1, description="Steps between two records.")


class MlflowConfig(Section):
    """A run of MLflow."""

    type: Literal["Mlflow"] = Field(description="Logs to MLflow; pip install 'mindllm[mlflow]'.")
    experiment: str = Field(default="mindllm", min_length=1, description="Experiment name.")
    name: str = Field(default="", description="Name of the run; empty: `trainer.model_name`.")
    tracking_uri: str = Field(
        default="", description="Server or database; empty: the local file `sqlite:///{output_dir}/mlflow.db`."
    )
    collect_freq: PositiveInt = Field(default=1, description="Steps between two records.")


class CheckpointMonitorConfig(Section):
    """Checkpoints."""

    type: Literal["CheckpointMonitor"] = Field(description="Saves checkpoints to `{output_dir}/checkpoint`.")
    save_checkpoint_steps: PositiveInt = Field(default=100, description="Steps between two checkpoints.")
    keep_checkpoint_max: PositiveInt = Field(default=5, description="Number of newest checkpoints to keep.")
    async_save: bool = Field(
        default=False,
        description="Writes during training, which pauses only to copy tensors to host memory.",
    )
    remove_redundancy: bool = Field(
        default=True, description="Writes tensors replicated over ranks once; false: each rank writes all its tensors."
    )


class EvalTasksConfig(EvaluationConfig):
    """Scores on public tasks during training. The keys of section `evaluation` apply as well."""

    type: Literal["EvalTasks"] = Field(description="Evaluates on public tasks at an interval.")
    tasks: List[str] = Field(min_length=1, description="Task names of lm-evaluation-harness.")
    eval_steps: PositiveInt = Field(default=1000, description="Steps between two evaluations.")


class NaNMonitorConfig(Section):
    """Stop on numbers that are not finite."""

    type: Literal["NaNMonitor"] = Field(
        description="Stops the run when the loss is not finite, and names the parameter."
    )


Callback = Annotated[
    LossMonitorConfig
    | MetricsMonitorConfig
    | SummaryMonitorConfig
    | TensorBoardConfig
    | WandbConfig
    | MlflowConfig
    | CheckpointMonitorConfig
    | EvalTasksConfig
    | NaNMonitorConfig,
    Field(discriminator="type"),
]

DEFAULT_CALLBACKS: tuple[Callback, ...] = (
    LossMonitorConfig(type="MFLossMonitor"),
    MetricsMonitorConfig(type="MetricsMonitor"),
    CheckpointMonitorConfig(type="CheckpointMonitor"),
    NaNMonitorConfig(type="NaNMonitor"),
)


Sink = Literal["log", "tensorboard"]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Sinks = Annotated[List[Sink] | None, BeforeValidator(_listed)]
GRADIENT, WEIGHT, UPDATE, LOGIT = "grad_norm", "param_norm", "update_ratio", "max_attention_logit"
KEYS: Mapping[str, str] = {
    GRADIENT: "local_norm_format",
    WEIGHT: "weight_state_format",
    UPDATE: "update_ratio_format",
    LOGIT: "max_attention_logit_format",
}
"""By the name of a figure, in ``metrics.jsonl`` and trackers: the key that asks for it."""


class MonitorConfig(Section):
    """The health figures of a step. Each key is null, `log`, `tensorboard`, or a list of them."""

    monitor_on: bool = Field(default=False, description="Computes the figures below in the compiled step.")
    step_interval: PositiveInt = Field(default=1, description="Steps between two records.")
    local_norm_format: Sinks = Field(
        default=("tensorboard",),
        description="Norm of the gradients, by group of layers. `tensorboard`: in `metrics.jsonl` and every tracker of "
        "`callbacks`; `log`: in the log as well; null: not computed.",
    )
    weight_state_format: Sinks = Field(
        default=("tensorboard",), description="Norm of the weights after the step, by group of layers."
    )
    update_ratio_format: Sinks = Field(
        default=("tensorboard",), description="Norm of the update, relative to the norm of the weights."
    )
    max_attention_logit_format: Sinks = Field(default=None, description="Largest attention logit of each layer.")
    layers_per_group: PositiveInt = Field(
        default=1,
        description="Decoder layers per group. Their parts (attention, feed_forward, norms) are separate figures.",
    )

    def watched(self) -> tuple[str, ...]:
        """Return the names of the computed figures, in the order of :data:`KEYS`."""
        return tuple(name for name, key in KEYS.items() if getattr(self, key)) if self.monitor_on else ()

    def logged(self) -> tuple[str, ...]:
        """Return the names of the figures that are logged."""
        return tuple(name for name in self.watched() if "log" in getattr(self, KEYS[name]))
