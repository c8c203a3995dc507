"""Runs the process that compiles or simulates one rank, and says why when it fails; whoever calls removes its directory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindllm.errors import UserError
from mindllm.jobs.cores import Core
from mindllm.jobs.environment import allocation_variables, without_job
from mindllm.jobs.memory import free_memory
from mindllm.jobs.process import die_with_parent
from mindllm.parallel.refusals import CompileFailed, reason
from mindllm.sources import python_path

SHOWN_LINES = 12
USER_ERROR = re.compile(r"^error: ", re.MULTILINE)
OUT_OF_MEMORY = re.compile(r"MemoryError|std::bad_alloc|Cannot allocate memory|[Oo]ut of memory|allocate memory failed")


def run_worker(
    module: str,
    arguments: Sequence[str],
    directory: Path,
    variables: Mapping[str, str],
    product: str,
    doing: str,
    timeout: float,
) -> str:
    """Runs ``python -m module`` inside ``directory``, where MindSpore may litter; returns what it printed.

    Args:
        variables: added to the environment.
        product: the file below ``directory`` that it must leave.
        doing: what it does, for messages: ``compiling rank 3``.
        timeout: seconds.

    Raises:
        UserError: what the worker says about the user's input.
        CompileFailed: MindSpore's own error, too little memory, or too long a time.
    """
    environment = {**without_job(os.environ), **allocation_variables(), **variables}
    environment["PYTHONPATH"] = python_path(environment)
    free = free_memory()
    try:
        with Core():
            result = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                preexec_fn=die_with_parent,
            )
    except subprocess.TimeoutExpired:
        raise CompileFailed(f"{doing} took longer than {timeout:.0f} s") from None
    if result.returncode != 0 or not (directory / product).is_file():
        raise failure(result.returncode, result.stderr, doing, free)
    return result.stdout + result.stderr


def failure(code: int, log: str, doing: str, free: str) -> UserError:
    """The error of a worker that ended with ``code``; ``free`` is what :func:`free_memory` said when it began."""
    starts = list(USER_ERROR.finditer(log))
    if code == UserError.exit_code and starts:
        said = log[starts[-1].end() :].strip()
        why = reason(log)
        return CompileFailed(f"{doing}: {said}\n  reason: {why}") if why else UserError(said)
    if code == -signal.SIGKILL or OUT_OF_MEMORY.search(log):
        how = "the system ended it" if code == -signal.SIGKILL else "an allocation failed"
        return CompileFailed(
            f"{doing}: too little memory ({how}; {free} were free when it began); run fewer ranks at a time, close other "
            "programs, or compile fewer layers (model.model_config.num_layers)"
        )
    how = f"exit code {code}" if code >= 0 else f"MindSpore's compiler was ended by {signal.Signals(-code).name}"
    return CompileFailed(f"{doing} failed ({how}):\n{last_error(log)}")


def last_error(output: str) -> str:
    """The final exception of a traceback, without the stacks MindSpore adds to it."""
    starts = list(re.finditer(r"^\w*(Error|Exception|Interrupt)\b.*$", output, re.MULTILINE))
    tail = output[starts[-1].start() :] if starts else output
    lines = [line for line in tail.splitlines() if line.strip()]
    return "\n".join(lines[:SHOWN_LINES] if starts else lines[-SHOWN_LINES:])
