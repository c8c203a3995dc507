"""Sections ``generation`` (how prompts are continued by ``run_mode: predict`` and ``run_mode: chat``) and ``evaluation`` (on
which public tasks a model is evaluated, and how).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mindllm.config.section import Fraction, List, PositiveInt, Section

DEFAULT_TOP_K = 50  # of transformers, where tokens are drawn and nothing gives top_k
DRAWS = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
StopString = Annotated[str, Field(min_length=1)]


class GenerationConfig(Section):
    """Section ``generation``: names and meanings of MindFormers' and Hugging Face's generation configurations."""

    max_new_tokens: PositiveInt = Field(default=128, description="Maximum length of a continuation, in tokens.")
    do_sample: bool = Field(default=False, description="Samples tokens; false: takes the most likely token.")
    temperature: float = Field(default=1.0, gt=0, description="Divisor of the logits when sampling.")
    top_k: int = Field(default=0, ge=0, description="Samples from the k most likely tokens; 0: from all.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Samples from the most likely tokens with this total probability."
    )
    min_p: Fraction = Field(
        default=0.0, description="Samples from tokens whose probability is at least this fraction of the highest one."
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="Logits of tokens in the prompt or continuation are divided by it if positive, else multiplied.",
    )
    presence_penalty: float = Field(
        default=0.0, description="Subtracted from the logits of tokens in the continuation."
    )
    frequency_penalty: float = Field(
        default=0.0, description="Subtracted from the logit of a token for each of its occurrences in the continuation."
    )
    num_beams: PositiveInt = Field(default=1, description="Beams of a beam search; 1: no beam search.")
    length_penalty: float = Field(
        default=1.0,
        description="A finished beam scores its log-probability / length ** this; values above 0 favor long beams.",
    )
    early_stopping: bool | Literal["never"] = Field(
        default=False,
        description="Beam search ends when: true: `num_beams` are finished; false: the best open beam, at its current "
        "length, scores below them; never: it cannot score above them at any length.",
    )
    num_return_sequences: PositiveInt = Field(
        default=1, description="Continuations per prompt: independent samples, or the best beams."
    )
    stop_strings: StopString | List[StopString] = Field(
        default=(), description="Texts that end a continuation. They are not part of it."
    )
    output_logprobs: bool = Field(
        default=False,
        description="Writes the log-probability of each token, before penalties, temperature and limits.",
    )
    seed: int | None = Field(default=None, ge=0, description="Seed of sampling; null: the seed of the run.")
    system_prompt: str = Field(
        default="",
        description="First message of every conversation, with `run_mode: chat` or `apply_chat_template`.",
    )
    apply_chat_template: bool = Field(
        default=False,
        description="`run_mode: predict` sends each prompt as a user message and writes the answer only.",
    )

    def describe(self) -> str:
        """Return the settings that choose tokens, as a line for people."""
        defaults = type(self).model_fields
        draws, penalties = (
            [f"{key} {getattr(self, key):g}" for key in keys if getattr(self, key) != defaults[key].default]
            for keys in (DRAWS, PENALTIES)
        )
        if self.num_beams > 1:
            line = f"beam search: num_beams {self.num_beams}, length_penalty {self.length_penalty:g}"
        elif self.do_sample:
            line = ", ".join(["sampling (do_sample: true)", *draws])
        else:
            unused = f"; {', '.join(draws)} without effect" if draws else ""
            line = f"greedy (do_sample: false{unused})"
        return ", ".join(["tokens: " + line, *penalties])

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings as a tuple."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings


class EvaluationConfig(Section):
    """Section ``evaluation``: options of lm-evaluation-harness by their names, and where its data lie."""

    data: str = Field(
        default="./eval_data",
        description="Directory of data sets in the layout of the hub: `cais/mmlu` is `{data}/cais/mmlu`.",
    )
    limit: PositiveInt | None = Field(default=None, description="Questions of each task; null: all.")
    num_fewshot: int | None = Field(
        default=None, ge=0, description="Solved examples before each question; null: the number of the task."
    )
    batch_size: PositiveInt = Field(default=8, description="Texts per batch.")
    apply_chat_template: bool = Field(
        default=False, description="Sends questions as a conversation, with the examples as turns."
    )
    gen_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Options of generated texts; they override the options of the task."
    )
    include_path: str = Field(
        default="", description="Directory with additional tasks, as YAMLs of lm-evaluation-harness."
    )
    log_samples: bool = Field(default=False, description="Writes every question with its answer.")
    confirm_run_unsafe_code: bool = Field(
        default=False,
        description="Runs code written by the model, for tasks that test it, and Python named by tasks of `include_path`.",
    )
