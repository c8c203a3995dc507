"""Answers to requests, kept one by one: an interrupted evaluation goes on, and several processes share the requests.

A process appends to a file of its own in a directory that all see. A line is whole or is not read, so any may be stopped at any
moment; the directory's name tells what the answers depend on, the model and its tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mindllm.errors import RunFailed
from mindllm.outside import append_lines, read_kept_lines
from mindllm.train.job.ranks import SINGLE_RANK, Ranks

TEXTS = "generate_until"  # the kind of request whose answer is a text


class Answers:
    """Answers in ``directory``, or nowhere; those of all ``ranks`` are complete when all have given theirs."""

    def __init__(self, directory: Path | None = None, ranks: Ranks = SINGLE_RANK) -> None:
        if ranks.count > 1 and directory is None:
            raise ValueError("processes share their answers through a directory")
        self.directory = directory
        self.ranks = ranks
        self.reused = 0
        self._known: dict[str, Any] = {}
        self._file: IO[str] | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._read()
            ranks.barrier()  # nobody writes before all have read: who reads what decides which requests are whose

    def of(self, kind: str, keys: Sequence[Any]) -> dict[Any, Any]:
        """The answers that are kept, by request."""
        found = {key: answer for key in keys if (answer := self._answer(kind, key)) is not None}
        self.reused += len(found)
        return found

    def share(self, missing: Sequence[Any]) -> list[Any]:
        """Those of the ``missing`` requests that this process answers: parts that follow each other, which begin alike."""
        ordered = sorted(missing, key=repr)
        begin, end = (len(ordered) * place // self.ranks.count for place in (self.ranks.rank, self.ranks.rank + 1))
        return ordered[begin:end] if self.ranks.count > 1 else list(missing)

    def put(self, kind: str, key: Any, answer: Any) -> None:
        """Keeps an answer; it is on its way to the disk when this returns."""
        name = _name(kind, key)
        self._known[name] = answer
        if self.directory is None:
            return
        if self._file is None:
            path = self.directory / f"rank_{self.ranks.rank}.jsonl"
            self._file = append_lines(path)
        self._file.write(json.dumps([name, answer]) + "\n")
        self._file.flush()

    def completed(self, kind: str, keys: Sequence[Any], known: Mapping[Any, Any]) -> dict[Any, Any]:
        """``known`` and what the other processes answered; waits for the last of them."""
        if self.ranks.count == 1:
            return dict(known)
        self.ranks.barrier()
        self._read()
        found = {key: self._answer(kind, key) for key in keys}
        missing = sum(answer is None for answer in found.values())
        if missing:
            raise RunFailed(
                f"{self.directory}: {missing} answers of other processes are not there: is it shared by all?"
            )
        self.ranks.barrier()
        return found

    def close(self) -> None:
        """No more answers come."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _answer(self, kind: str, key: Any) -> Any:
        """Return the answer to a request; None if it is unknown, or of another kind."""
        answer = self._known.get(_name(kind, key))
        return answer if isinstance(answer, str) == (kind == TEXTS) else None

    def _read(self) -> None:
        assert self.directory is not None
        for path in sorted(self.directory.glob("rank_*.jsonl")):
            self._known.update(read_kept_lines(path, _pair))


def _pair(line: Any) -> tuple[str, Any]:
    """Return the name of a request and its answer: a text, or a log-likelihood and whether it is the greedy choice."""
    name, answer = line
    if not isinstance(answer, str):
        likelihood, greedy = answer
        if type(likelihood) not in (int, float) or type(greedy) is not bool:
            raise TypeError(f"{answer} is not an answer")
    if not isinstance(name, str):
        raise TypeError(f"{name} is not the name of a request")
    return name, answer


def _name(kind: str, key: Any) -> str:
    """What tells a request apart, short."""
    return hashlib.sha256(repr((kind, key)).encode()).hexdigest()[:32]
