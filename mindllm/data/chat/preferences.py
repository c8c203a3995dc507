"""Rows of preference files as two conversations: the same words before, then the chosen answer or the rejected one.

Forms are told apart by their keys: those of TRL (``prompt``, ``chosen``, ``rejected``), of LLaMA-Factory (``conversations`` or
``instruction``, with ``chosen`` and ``rejected``) and of ms-swift (``messages`` with ``rejected_response``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mindllm.data.chat.conversations import Conversation, Message, messages, messages_of, sharegpt, sharegpt_turn
from mindllm.data.records import Record
from mindllm.errors import UserError

READER = "pairs of answers"
FORMS = "prompt, conversations, instruction or nothing, with chosen and rejected; or messages with rejected_response"


@dataclass(frozen=True)
class Pair:
    """Two conversations whose first ``shared`` turns of the assistant are the same: answers are what comes behind these."""

    chosen: Conversation
    rejected: Conversation
    shared: int


def pair_of(record: Record, place: str) -> Pair:
    """The pair in a record; ``place`` names it in errors.

    Raises UserError where keys are missing, the assistant says nothing, nobody asks, or both answers are the same.
    """
    if "rejected_response" not in record and not {"chosen", "rejected"} <= record.keys():
        raise UserError(f"{place}: no pair of answers (keys: {', '.join(record)}); a row has {FORMS}")
    chosen, rejected = (
        messages_of(record, lambda row, name=name: _conversation(row, name), READER, place)  # type: ignore[misc]
        for name in ("chosen", "rejected")
    )
    same = list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    for name, conversation in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in conversation[len(same) :]):
            advice = "; chosen and rejected are the same" if chosen == rejected else ""
            raise UserError(f"{place}: {name} has no answer of its own{advice}; remove the row")
        if conversation[0]["role"] == "assistant":
            raise UserError(f"{place}: {name} begins with an answer; give the question in prompt")
    tools = record.get("tools") or None
    shared = sum(first["role"] == "assistant" for first, _ in same)
    return Pair(Conversation(chosen, tools), Conversation(rejected, tools), shared)


def _conversation(record: Record, name: str) -> Iterable[Message]:
    """All messages up to the answer ``name``, that included. One that begins before the answer is a whole conversation."""
    if "rejected_response" in record:
        *before, last = messages(record)
        if last["role"] != "assistant":
            raise ValueError(f"messages end with the {last['role']}, not with the chosen answer")
        return [*before, last if name == "chosen" else {"role": "assistant", "content": record["rejected_response"]}]
    answer = _answer(record[name])
    return answer if answer and answer[0]["role"] not in ("assistant", "tool") else [*_before(record), *answer]


def _before(record: Record) -> list[Message]:
    if "conversations" in record:
        return list(sharegpt(record))
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    if "instruction" in record:
        asked = f"{record['instruction']}\n{record['input']}" if record.get("input") else record["instruction"]
    else:
        asked = record.get("prompt", [])
    if isinstance(asked, str):
        return [*system, {"role": "user", "content": asked}]
    return [*system, *(sharegpt_turn(turn) for turn in asked)]


def _answer(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    return [sharegpt_turn(turn) for turn in turns]
