"""Continuations of prompts as a result, found in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindllm.arguments import Prompt
from mindllm.config import RunConfig, override_config, render_config
from mindllm.errors import UserError
from mindllm.jobs.process import run_yaml_in_child
from mindllm.process.temporary import temporary_directory
from mindllm.results import Result
from mindllm.terminal.tables import Table, figures, texts
from mindllm.units import counted

if TYPE_CHECKING:
    from mindllm.results import Part


@dataclass(frozen=True, repr=False)
class Generation(Result):
    """What prompts are continued with.

    Attributes:
        records: of every prompt what it was and its ``continuations``, each with ``text``, ``finish_reason`` and ``tokens``, as
            ``save_file`` has them.
    """

    records: tuple[Mapping[str, Any], ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The continuation of every prompt; of several the first."""
        return tuple(record["continuations"][0]["text"] for record in self.records)

    def summary(self) -> str:
        """Return how many prompts were continued."""
        return counted(len(self.records), "prompt")

    def tree(self) -> dict[str, Any]:
        """Return the records."""
        return {"results": [dict(record) for record in self.records]}

    def parts(self) -> Iterator[Part]:
        """Yield a row for every continuation."""
        rows = [
            (_shown(record), one["text"], str(len(one["tokens"])), one["finish_reason"])
            for record in self.records
            for one in record["continuations"]
        ]
        columns = [*texts("prompt", "continuation"), *figures("tokens"), *texts("ended by")]
        yield Table(self.summary(), columns, rows)


def generate_in_child(config: RunConfig, prompts: Sequence[Prompt]) -> Generation:
    """Continue prompts, texts or conversations, with the weights of ``load_checkpoint``.

    Raises:
        UserError: there are no weights, no tokenizer, or a prompt that cannot be continued.
        RunFailed: the process failed.
    """
    if not prompts:
        raise UserError("prompts: holds none; give at least one")
    with temporary_directory("mindllm_prompts_") as directory:
        asked, answered = directory / "prompts.jsonl", directory / "results.jsonl"
        lines = [{"prompt": one} if isinstance(one, str) else {"messages": [*map(dict, one)]} for one in prompts]
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        files = {"input_data": str(asked), "save_file": str(answered), "run_mode": "predict"}
        run_yaml_in_child(render_config(override_config(config, files)), "predict")
        found = [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    return Generation(tuple(found))


def _shown(record: Mapping[str, Any]) -> str:
    """The prompt, or the last message of a conversation."""
    return record["prompt"] if "prompt" in record else record["messages"][-1]["content"]
