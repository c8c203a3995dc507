"""A run mode in a process of its own: MindSpore takes one device, one context and one environment per process, at its start."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.launch.process import JobProcess
from mindllm.process.temporary import temporary_directory

POLL_SECONDS, GRACE = 0.2, 120.0  # between two looks; to save a checkpoint after an interrupt
ERROR = "error: "
PACKAGES = Path(__file__).resolve().parents[2]


def run_child(arguments: Sequence[str], look: Callable[[], None] = lambda: None) -> None:
    """Run ``mindllm`` with ``arguments`` in a process of its own, with ``look`` called now and then.

    An interrupt is passed on, so that what trains saves a checkpoint, and raised when the process has ended.

    Raises:
        UserError, CheckFailed, RunFailed: the process ended with their exit code; the message is what it said.
    """
    search = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH", "")]))
    with temporary_directory("mindllm_child_") as directory:
        command = [sys.executable, "-m", "mindllm", *arguments]
        process = JobProcess(arguments[0], command, {"PYTHONPATH": search}, directory / "log")
        try:
            _wait(process, look)
            look()
            _raise_what_it_said(process)
        except KeyboardInterrupt:
            process.send(signal.SIGINT)
            _wait(process, lambda: None, time.monotonic() + GRACE)
            raise
        finally:
            process.kill()


def _wait(process: JobProcess, look: Callable[[], None], deadline: float | None = None) -> None:
    while process.poll() is None and (deadline is None or time.monotonic() < deadline):
        look()
        time.sleep(POLL_SECONDS)


def _raise_what_it_said(process: JobProcess) -> None:
    code = process.poll()
    if code == 0:
        return
    text = process.log.read_text(encoding="utf-8", errors="replace")
    said = text[text.rindex(ERROR) + len(ERROR) :].strip() if ERROR in text else ""
    kinds: dict[int | None, type[Exception]] = {one.exit_code: one for one in (UserError, CheckFailed, RunFailed)}
    if said and code in kinds:
        raise kinds[code](said)
    raise RunFailed(f"mindllm {process.name} {process.ending()}\n{process.last_lines()}")


def run_yaml_in_child(text: str, mode: str, look: Callable[[], None] = lambda: None) -> None:
    """Run a YAML in one of the run modes, in a process of its own; raises as :func:`run_child`."""
    with temporary_directory("mindllm_run_") as directory:
        path = directory / "run.yaml"
        path.write_text(text, encoding="utf-8")
        run_child([mode, "--config", str(path)], look)
