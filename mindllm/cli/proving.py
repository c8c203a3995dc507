"""How a proof is shown while it is made, and the exit code of its verdict: of all commands that prove."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import TaskID

from mindllm.errors import CheckFailed, RunFailed
from mindllm.prove.answers import Answer, Standing
from mindllm.prove.pieces import PIECES, Piece
from mindllm.prove.proof import COLOURS, Verdict
from mindllm.terminal.console import error_console, output, progress, styled

CODES = {Verdict.READY: 0, Verdict.REFUTED: CheckFailed.exit_code, Verdict.NOT_PROVED: RunFailed.exit_code}


@contextmanager
def watched(silent: bool) -> Iterator[tuple]:
    """Yield what prints every answer as it is known, and what draws a bar for every piece at work."""
    begun = time.monotonic()
    with progress(console=error_console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def answered(answer: Answer) -> None:
            seconds = f"{time.monotonic() - begun:6.1f} s  "
            standing = (f"{answer.standing.value:<11}", COLOURS[answer.standing])
            if not silent:
                output.print(styled(seconds, standing, f"{answer.question}: {answer.says}"))
            done = next((piece.name for piece in PIECES if answer.question in piece.questions), "")
            if answer.standing is not Standing.EXPECTED and done in tasks:
                bar.remove_task(tasks.pop(done))

        def told(piece: Piece, what: str, done: int, total: int | None) -> None:
            if piece.name not in tasks:
                tasks[piece.name] = bar.add_task(piece.name, total=None)
            bar.update(tasks[piece.name], description=f"{piece.name}: {what}", completed=done, total=total)

        yield answered, told
