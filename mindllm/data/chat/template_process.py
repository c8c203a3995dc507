"""Runs the templates of others in a process of their own, whose memory and time for one request are limited.

A template is a program, and no sandbox bounds what one may compute: ``'x' * 10**10``, loops in loops, lists that hold themselves
twice. One process serves all templates of this one; it is started when the first is needed, and again after it had to be ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from mindllm.data.chat import template_program
from mindllm.data.chat.template_program import receive, send
from mindllm.process.exit_hooks import when_leaving

SECONDS = 10.0  # of computing for one conversation: a thousand times what a long one takes
MEMORY = 1 << 30
NO_DATE = "0001-01-01"
# The paths of this interpreter, not the directory of the program, whose files have names of the standard library.
START = "import sys, runpy; sys.path[:] = {paths}; sys.argv[1:] = ['{memory}']; runpy.run_path({file!r}, run_name='__main__')"


class TemplateFailed(Exception):
    """A template did not render; ``line`` is that of its source where it is no template."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def render_apart(source: str, variables: list[dict[str, Any]], now: str) -> list[str]:
    """Return what the template ``source`` writes for each of ``variables`` at the date ``now``, computed in the other process.

    Raises:
        TemplateFailed: the template is invalid, refuses, or takes more time or memory than any conversation needs.
    """
    return _checked(_ask(source, variables, now))["texts"]


def render_here(source: str, variables: list[dict[str, Any]], now: str) -> list[str]:
    """Return what a template of our own writes, computed in this process; raises as :func:`render_apart`."""
    return _checked(template_program.rendered(source, variables, now))["texts"]


def names_read(source: str, apart: bool) -> frozenset[str]:
    """Return the names of the variables and functions that a template reads from outside; raises as :func:`render_apart`."""
    answer = _ask(source, [], NO_DATE) if apart else template_program.rendered(source, [], NO_DATE)
    return frozenset(_checked(answer)["names"])


def _ask(source: str, variables: list[dict[str, Any]], now: str) -> dict[str, Any]:
    with _state.lock:
        return _state.running().ask(source, variables, now)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that has texts; raises TemplateFailed for one of an error."""
    if "texts" not in answer:
        raise TemplateFailed(answer["error"], answer.get("line"))
    return answer


class _Process:
    """The other process. It ends with its standard input, so it does not outlive this one."""

    def __init__(self) -> None:
        command = START.format(paths=json.dumps(sys.path), memory=MEMORY, file=template_program.__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, source: str, variables: list[dict[str, Any]], now: str) -> dict[str, Any]:
        """Sends a request and waits for its answer; says why there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            request = {"source": source, "variables": variables, "now": now, "seconds": SECONDS}
            send(self._process.stdin, request)
            answer = receive(self._process.stdout)
        except BaseException as error:
            self.end()  # what comes next on the pipe would be the answer to this
            if not isinstance(error, OSError):
                raise
            answer = None
        if answer is not None:
            return answer
        code = self.end()
        if code == -signal.SIGPROF:
            return {"error": f"it computes for over {SECONDS:g} seconds"}
        return {
            "error": f"it takes more memory than any conversation needs, or is nested too deeply (exit code {code})"
        }

    def end(self) -> int:
        """Ends the process, if it still runs, and returns how it ended."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class _State:
    """What this process has: none or one other process, and a lock, because its pipe takes one request at a time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """After a fork: the pipe is the parent's, and its lock may have been held."""
        self.lock = threading.Lock()
        self.process: _Process | None = None

    def running(self) -> _Process:
        if self.process is None or not self.process.is_running:
            self.process = _Process()
        return self.process

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None


_state = _State()
os.register_at_fork(after_in_child=_state.forget)
when_leaving(_state.end)
