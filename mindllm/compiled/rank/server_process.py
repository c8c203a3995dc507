"""The process that compiles several ranks, as who starts it sees it: its command, what it leaves, and why it failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mindllm.compiled.rank.compile_rank import CONFIG, ERRORS_ONLY
from mindllm.compiled.rank.rank_server import LOG
from mindllm.compiled.rank.worker import GRAPH
from mindllm.compiled.rank.worker_process import USER_ERROR, failure
from mindllm.config import RunConfig, render_config
from mindllm.errors import UserError
from mindllm.jobs.environment import allocation_variables
from mindllm.jobs.process import die_with_parent
from mindllm.sources import python_path

EXIT_CODE = re.compile(r"\nexit code (-?\d+)\s*$")
SERVER_LOG = "server.txt"


def start_server(
    config: RunConfig, ranks: Sequence[int], training: bool, directory: Path, workers: int
) -> subprocess.Popen[bytes]:
    """Start compiling ranks into ``directory``, so many at a time; the process dies with this one."""
    (directory / CONFIG).write_text(render_config(config), encoding="utf-8")
    options = {
        "config": CONFIG,
        "ranks": ",".join(map(str, ranks)),
        "workers": str(workers),
        "output": str(directory),
    }
    with (directory / SERVER_LOG).open("wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mindllm.compiled.rank.rank_server",
                *(f"--{name}={value}" for name, value in options.items()),
                *(() if training else ("--evaluation",)),
            ],
            cwd=directory,
            env={
                "GLOG_v": ERRORS_ONLY,
                **os.environ,
                **allocation_variables(),
                "PYTHONPATH": python_path(),
                "MS_DEV_PRECOMPILE_ONLY": "1",
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def graph_in(directory: Path, rank: int) -> Path:
    """Return where the graph of a rank is, or will be."""
    return directory / str(rank) / GRAPH


def failure_of(directory: Path, ranks: Sequence[int], free: str) -> UserError:
    """Return why the first of these ranks that were begun has no graph; ``free`` is the memory there was.

    Where none was begun, the process that was to begin them has said why, unless the system ended it.
    """
    begun = next((rank for rank in ranks if (directory / str(rank) / LOG).is_file()), None)
    log = directory / SERVER_LOG if begun is None else directory / str(begun) / LOG
    text = log.read_text(errors="replace") if log.is_file() else ""
    ended = EXIT_CODE.search(text)
    code = int(ended.group(1)) if ended else -signal.SIGKILL
    if begun is None and text.strip():
        code = UserError.exit_code if USER_ERROR.search(text) else 1
    return failure(code, EXIT_CODE.sub("", text), f"compiling rank {ranks[0] if begun is None else begun}", free)
