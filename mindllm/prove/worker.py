"""One piece of a proof in a process of its own: ``python -m mindllm.prove.worker``, started by an executor.

What happens to it happens to its questions alone. It says how far it is on the descriptor that it is given, a JSON list a line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.config import RunConfig, load_config
from mindllm.errors import RunFailed, UserError
from mindllm.files import atomic_open
from mindllm.parallel.refusals import CompileFailed
from mindllm.prove.answers import Answer, Finding, Standing, of_error
from mindllm.prove.pieces import PIECES, Options, Piece
from mindllm.terminal.progress import Progress, unwatched

SAID_SECONDS = 0.2  # between two words on how far it is


def main(arguments: Sequence[str] | None = None) -> int:
    """Does one piece and writes its answers."""
    parser = CommandParser(
        prog="python -m mindllm.prove.worker",
        description="Does one piece of a proof and writes its answers.",
        epilog="example: python -m mindllm.prove.worker --piece ranks --config run.yaml --options options.json --output a.json",
    )
    parser.add_argument("--piece", required=True, choices=[piece.name for piece in PIECES], help="which piece")
    parser.add_argument("--config", required=True, help="YAML of the run, resolved")
    parser.add_argument("--options", type=Path, required=True, help="JSON of the options of the proof")
    parser.add_argument("--output", type=Path, required=True, help="file that receives the answers as JSON")
    parser.add_argument("--told", type=int, help="file descriptor that is told how far it is")
    options = parser.parse_args(arguments)
    piece = next(piece for piece in PIECES if piece.name == options.piece)
    how = Options(**json.loads(options.options.read_text(encoding="utf-8")))
    config = load_config(options.config)
    found = do(piece, config, how, _Told(options.told) if options.told is not None else unwatched)
    with atomic_open(options.output) as file:
        json.dump([answer.tree() for answer in found], file)
    return 0


def do(piece: Piece, config: RunConfig, options: Options, progress: Progress = unwatched) -> list[Answer]:
    """Do a piece; what keeps it from being done is an answer, too."""
    begun = time.monotonic()
    try:
        found = list(piece.work()(config, options, progress))
    except CompileFailed as error:
        found = _without(piece, "does not compile", of_error(error), Standing.REFUTED)
    except UserError as error:
        found = _without(piece, str(error).splitlines()[0], of_error(error))
    except RunFailed as error:
        found = _without(piece, str(error).splitlines()[0], (Finding(str(error)),))
    seconds = round(time.monotonic() - begun, 3)
    return [replace(answer, seconds=seconds) for answer in found]


def _without(
    piece: Piece, says: str, findings: tuple[Finding, ...], first: Standing = Standing.NOT_PROVED
) -> list[Answer]:
    """Answers to the questions of a piece that could not be done; the first question stands as ``first``."""
    standings = [first, *[Standing.NOT_PROVED] * (len(piece.questions) - 1)]
    return [
        Answer(question, standing, says, findings)
        for question, standing in zip(piece.questions, standings, strict=True)
    ]


class _Told:
    """Writes how far it is, not more often than anybody reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._last = descriptor, 0.0

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        now = time.monotonic()
        if now - self._last >= SAID_SECONDS or total is None:
            self._last = now
            os.write(self._descriptor, f"{json.dumps([what, done, total])}\n".encode())


if __name__ == "__main__":
    run_command(main)
