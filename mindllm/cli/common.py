"""Parts that several verbs share: common options, and the display and exit code of a proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mindllm.errors import CheckFailed, RunFailed
from mindllm.process.interrupts import INTERRUPTED
from mindllm.terminal.progress import Progress
from mindllm.timing.shipped import DEFAULT, shipped_devices

if TYPE_CHECKING:
    from mindllm.prove.answers import Answer
    from mindllm.prove.proof import Proof

EVERY_RANK = (
    "compile every rank (default: compile a few of each stage, and derive the others where that is proved valid)"
)


def add_device_option(parser: Any, purpose: str = "device description") -> None:
    """Add ``--device``: a YAML of a device, or the name of a shipped one."""
    names = ", ".join(shipped_devices())
    parser.add_argument(
        "--device", default=DEFAULT, metavar="FILE", help=f"{purpose}: a YAML or one of {names} (default: %(default)s)"
    )


def add_json_option(parser: Any, content: str = "one JSON object") -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=f"print {content} instead of tables")


def exit_code_of(proof: Proof) -> int:
    """Return the exit code of a proof: that of its verdict, or of an interruption."""
    from mindllm.prove.proof import Verdict

    codes = {Verdict.READY: 0, Verdict.REFUTED: CheckFailed.exit_code, Verdict.NOT_PROVED: RunFailed.exit_code}
    return codes[proof.verdict] if proof.complete else INTERRUPTED


@contextmanager
def proof_display(silent: bool) -> Iterator[tuple[Callable[[Answer], None], Progress]]:
    """Yield a callback that prints each answer unless ``silent``, and one that draws a bar for each check at work."""
    from mindllm.prove.answers import Standing
    from mindllm.prove.pieces import PIECES
    from mindllm.prove.proof import COLOURS
    from mindllm.terminal.console import error_console, output, progress, styled
    from mindllm.terminal.text import visible

    started = time.monotonic()
    with progress(console=error_console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def print_answer(answer: Answer) -> None:
            seconds = f"{time.monotonic() - started:6.1f} s  "
            standing = (f"{answer.standing.value:<11}", COLOURS[answer.standing])
            if not silent:
                output.print(styled(seconds, standing, f"{answer.question}: {answer.says}"))
            piece = next((piece.name for piece in PIECES if answer.question in piece.questions), "")
            if answer.standing is not Standing.EXPECTED and piece in tasks:
                bar.remove_task(tasks.pop(piece))

        def report(what: str, done: int = 0, total: int | None = None) -> None:
            # progress of a check begins with its name; any other work has one bar of its own
            name = what.partition(":")[0]
            piece = name if any(name == piece.name for piece in PIECES) else ""
            if not piece and total is None:
                bar.console.print(visible(what))
                return
            if piece not in tasks:
                tasks[piece] = bar.add_task(what, total=None)
            bar.update(tasks[piece], description=what, completed=done, total=total)
            if not piece and done == total:
                bar.remove_task(tasks.pop(piece))

        yield print_answer, report
