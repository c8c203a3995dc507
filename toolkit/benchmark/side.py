"""One side of a benchmark: a worker process that does a round of work whenever it is told to.

Each side is a process of its own, so that their thread pools do not meet; sides take turns, and wait while another works.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mindllm.errors import RunFailed

ROOT = Path(__file__).resolve().parents[2]


class Side:
    """The worker ``python -m module name``, which reads JSON lines, ``sizes`` first, and answers each later line with one."""

    def __init__(self, module: str, name: str, sizes: Mapping[str, Any], directory: str | os.PathLike[str]) -> None:
        self.name = name
        self.started = time.perf_counter()
        threads = str(sizes["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLOG_v": "3"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._errors = open(Path(directory, f"{name}.log"), "w+", encoding="utf-8")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=directory,
            env=environment,
        )
        self._send(sizes)

    def ask(self, question: Any = "run") -> dict[str, Any]:
        """One round. Raises RunFailed with what the worker wrote when it ends instead of answering."""
        self._send(question)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise RunFailed(f"the side {self.name} failed:\n{self._errors.read()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the worker."""
        self._process.terminate()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer tells


def serve(sides: Mapping[str, Callable[[dict[str, Any]], Callable[[], dict[str, Any]]]]) -> None:
    """The worker's half: builds the side named on the command line from the sizes, then answers until its input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    sizes = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: sizes["threads"]])
    run = sides[sys.argv[1]](sizes)
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers, flush=True)


def spread(values: Sequence[float], digits: int) -> str:
    """Median with the lowest and highest value."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
