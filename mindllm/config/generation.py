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

    max_new_tokens: PositiveInt = Field(default=128, description="Longest continuation.")
    do_sample: bool = Field(default=False, description="Draws tokens; false: takes the most likely one.")
    temperature: float = Field(default=1.0, gt=0, description="Divisor of the logits when sampling.")
    top_k: int = Field(default=0, ge=0, description="Samples among the k most likely tokens; 0: all.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Samples among the most likely tokens of this total probability."
    )
    min_p: Fraction = Field(
        default=0.0, description="Samples among the tokens at least this times as likely as the most likely one."
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="Tokens of the prompt and the continuation: divides their logits above 0, else multiplies.",
    )
    presence_penalty: float = Field(
        default=0.0, description="Subtracted from the logits of tokens that the continuation has."
    )
    frequency_penalty: float = Field(
        default=0.0, description="Subtracted from the logit of a token for every time the continuation has it."
    )
    num_beams: PositiveInt = Field(default=1, description="Beams of a beam search; 1: none.")
    length_penalty: float = Field(
        default=1.0,
        description="A finished beam scores its log-probability / length ** this; above 0 favours long ones.",
    )
    early_stopping: bool | Literal["never"] = Field(
        default=False,
        description="Beam search ends: true: with `num_beams` finished; false: when the best open beam, at its present length, "
        "scores below them; never: when at no length it could score above.",
    )
    num_return_sequences: PositiveInt = Field(
        default=1, description="Continuations of a prompt: as many draws, or the best of the beams."
    )
    stop_strings: StopString | List[StopString] = Field(
        default=(), description="Texts that end a continuation; they are not part of it."
    )
    output_logprobs: bool = Field(
        default=False,
        description="Writes the log-probability the model gave each token, before penalties, temperature and limits.",
    )
    seed: int | None = Field(default=None, ge=0, description="Seed of the draws; null: the seed of the run.")
    system_prompt: str = Field(
        default="",
        description="First message of every conversation: of `run_mode: chat`, and of `apply_chat_template`.",
    )
    apply_chat_template: bool = Field(
        default=False,
        description="`run_mode: predict` asks each prompt as a person does in a conversation, and writes the answer alone.",
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
        """The stop strings, as a tuple in every case."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings


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
