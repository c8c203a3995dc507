"""Runs the pieces of a proof, each as a task in a process of its own: what happens to one affects its questions alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from mindllm.config import RunConfig, load_config, tree_of
from mindllm.errors import RunFailed, UserError
from mindllm.files import atomic_open
from mindllm.jobs import worker
from mindllm.jobs.cores import cores, shared_cores
from mindllm.jobs.memory import ADVICE
from mindllm.jobs.pool import Outcome, Pool, Task
from mindllm.jobs.process import ending, last_lines
from mindllm.parallel.refusals import CompileFailed
from mindllm.process.temporary import temporary_directory
from mindllm.prove.answers import Answer, Finding, Standing, of_error
from mindllm.prove.pieces import PIECES, Options, Piece
from mindllm.terminal.progress import Progress, unwatched

PRELOAD = __name__
PieceProgress = Callable[[Piece, str, int, "int | None"], None]  # a piece, what it does, how many are done, of how many
PieceAnswers = tuple[Piece, tuple[Answer, ...]]


def run_pieces(
    config: RunConfig, pieces: Sequence[Piece], options: Options, on_progress: PieceProgress
) -> Iterator[PieceAnswers]:
    """Yield the answers of each piece as it ends, as many pieces at a time as there are cores.

    A piece that lacked memory next to others runs again after them, alone. Closing the iterator kills all pieces.
    """
    by_name = {piece.name: piece for piece in pieces}
    arguments = (tree_of(config), asdict(options))
    with (
        temporary_directory("mindllm_prove_") as directory,
        Pool(
            cores(),
            preload=PRELOAD,
            environment=shared_cores(directory),
            on_progress=lambda task, *progress: on_progress(by_name[task.name], *progress),
        ) as pool,
    ):
        for number, piece in enumerate(pieces):
            output = directory / f"{number}.json"
            pool.submit(Task(piece.name, FUNCTION, (piece.name, *arguments), output, timeout=math.inf))
        for outcome in pool.outcomes():
            answers = _read_answers(by_name[outcome.task.name], outcome)
            if not outcome.alone and any(ADVICE in finding.message for one in answers for finding in one.findings):
                pool.submit(replace(outcome.task, slots=cores()))
            else:
                yield by_name[outcome.task.name], answers


def _read_answers(piece: Piece, outcome: Outcome) -> tuple[Answer, ...]:
    """Return the answers that a task has written, or how it ended without."""
    assert outcome.task.output is not None
    if outcome.code == 0 and outcome.task.output.is_file():
        return tuple(map(Answer.of_tree, json.loads(outcome.task.output.read_text(encoding="utf-8"))))
    reason = f"the process of this piece {ending(outcome.code)}"
    finding = Finding(f"{reason}\n{last_lines(outcome.log)}".strip())
    return tuple(Answer(question, Standing.NOT_PROVED, reason, (finding,)) for question in piece.questions)


def run_piece(name: str, tree: dict[str, Any], options: dict[str, Any], output: str) -> None:
    """Run one piece and write its answers: a task."""
    piece = next(piece for piece in PIECES if piece.name == name)
    answers = answer_questions(piece, load_config(tree), Options(**options), worker.report_progress)
    with atomic_open(output) as file:
        json.dump([answer.tree() for answer in answers], file)


FUNCTION = f"{__name__}:{run_piece.__name__}"


def answer_questions(piece: Piece, config: RunConfig, options: Options, progress: Progress = unwatched) -> list[Answer]:
    """Return the answers of a piece. An error is an answer, too."""
    start = time.monotonic()
    try:
        answers = list(piece.work()(config, options, progress))
    except CompileFailed as error:
        answers = _unanswered(piece, "does not compile", of_error(error), Standing.REFUTED)
    except UserError as error:
        answers = _unanswered(piece, str(error).splitlines()[0], of_error(error))
    except RunFailed as error:
        answers = _unanswered(piece, str(error).splitlines()[0], (Finding(str(error)),))
    seconds = round(time.monotonic() - start, 3)
    return [replace(answer, seconds=seconds) for answer in answers]


def _unanswered(
    piece: Piece, reason: str, findings: tuple[Finding, ...], first: Standing = Standing.NOT_PROVED
) -> list[Answer]:
    """Return answers for a piece that failed. The first question gets the standing ``first``, the others are not proved."""
    standings = [first, *[Standing.NOT_PROVED] * (len(piece.questions) - 1)]
    return [
        Answer(question, standing, reason, findings)
        for question, standing in zip(piece.questions, standings, strict=True)
    ]
