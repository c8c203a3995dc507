"""Section ``evaluation``: on which public tasks a model is evaluated, and how."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mindllm.config.section import PositiveInt, Section


class EvaluationConfig(Section):
    """Section ``evaluation``: options of lm-evaluation-harness by their names, and where its data lie."""

    data: str = Field(
        default="./eval_data",
        description="Directory of data sets in the layout of the hub: `cais/mmlu` lies in `{data}/cais/mmlu`.",
    )
    limit: PositiveInt | None = Field(default=None, description="Questions of each task; null: all.")
    num_fewshot: int | None = Field(
        default=None, ge=0, description="Solved examples before each question; null: what the task says."
    )
    batch_size: PositiveInt = Field(default=8, description="Texts that go through the model together.")
    apply_chat_template: bool = Field(default=False, description="Asks as in a conversation, examples as its turns.")
    gen_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Options of texts that the model writes, over those of the task."
    )
    include_path: str = Field(default="", description="Directory of more tasks, as YAMLs of lm-evaluation-harness.")
    log_samples: bool = Field(default=False, description="Writes every question with its answer.")
    confirm_run_unsafe_code: bool = Field(
        default=False,
        description="Runs code that the model writes, for tasks that test it, and Python that tasks of `include_path` name.",
    )
