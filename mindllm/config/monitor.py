"""Section ``monitor_config``: the health figures of a step, which the compiled step computes beside loss and norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindllm.config.section import List, PositiveInt, Section

Sink = Literal["log", "tensorboard"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Sinks = Annotated[List[Sink] | None, BeforeValidator(_as_list)]
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
        description="Norm of the gradients, by group of layers. `tensorboard`: in `metrics.jsonl` and every tracker among "
        "`callbacks`; `log`: a line of the log, too; null: it is not computed.",
    )
    weight_state_format: Sinks = Field(
        default=("tensorboard",), description="Norm of the weights after the step, by group of layers."
    )
    update_ratio_format: Sinks = Field(
        default=("tensorboard",), description="Norm of what the step added to the weights, relative to theirs."
    )
    max_attention_logit_format: Sinks = Field(default=None, description="Largest attention logit of each layer.")
    layers_per_group: PositiveInt = Field(
        default=1, description="Decoder layers whose parts (attention, feed_forward, norms) are one group."
    )

    def watched(self) -> tuple[str, ...]:
        """Names of the figures that are computed, in the order of :data:`KEYS`."""
        return tuple(name for name, key in KEYS.items() if getattr(self, key)) if self.monitor_on else ()

    def logged(self) -> tuple[str, ...]:
        """Those of them that the log shows."""
        return tuple(name for name in self.watched() if "log" in getattr(self, KEYS[name]))
