"""The option ``--executor``, and the back end that runs tasks on the nodes of a Ray cluster.

Ray schedules tasks by cores and memory, and repeats those of a lost node. All nodes need the same mindllm and MindSpore as this
machine; they read none of its files. A worker of Ray runs one task after another, so a function that imports MindSpore must do so
in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mindllm.errors import RunFailed, UserError, nearest
from mindllm.jobs.memory import gibibytes
from mindllm.sources import python_path

LOCAL, RAY = "local", "ray"
EXECUTORS = (LOCAL, RAY)
VARIABLE = "MINDLLM_EXECUTOR"  # inherited by the processes that a command starts
ADDRESS = "RAY_ADDRESS"
REACH_SECONDS = 10.0
RETRIES = 5  # of work whose node or process is lost
HOW = "start one with ray start --head, and name it in $RAY_ADDRESS"


def add_executor_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--executor``."""
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        action=_UseExecutor,
        help=f"where to run simulations, ranks and strategies: {LOCAL} processes, or the {RAY} cluster of $RAY_ADDRESS "
        f"(default: {LOCAL}, or ${VARIABLE}; requires pip install 'mindllm[ray]')",
    )


def is_spread() -> bool:
    """Return whether work goes to a Ray cluster; raise UserError for a variable that names no executor."""
    chosen = os.environ.get(VARIABLE, LOCAL)
    if chosen not in EXECUTORS:
        raise UserError(f"{VARIABLE}: {chosen} is no executor{nearest(chosen, EXECUTORS)}")
    return chosen == RAY


class _UseExecutor(argparse.Action):
    """Sets the executor of this process and of those it starts."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        os.environ[VARIABLE] = str(values)
        setattr(namespace, self.dest, values)


@dataclass(frozen=True)
class Work:
    """A call of a function of this package by its name, ``module:function``, with plain arguments.

    Attributes:
        name: what it is about, for people.
        memory: bytes that it takes.
    """

    function: str
    arguments: tuple[Any, ...]
    name: str
    memory: int = 0


class Spread:
    """Work that was given to the cluster; results come in whatever order they are done.

    Args:
        works: what to do.

    Raises:
        UserError: there is no cluster, or no node has the memory for one piece.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._ray = connected()
        _refuse_too_large(self._ray, works)
        remote = self._ray.remote(max_retries=RETRIES, num_cpus=1)(_call)
        variables = {"PYTHONPATH": python_path(), VARIABLE: LOCAL}
        self._of = {
            remote.options(memory=work.memory, runtime_env={"env_vars": variables}).remote(
                work.function, work.arguments
            ): place
            for place, work in enumerate(works)
        }
        self._works = works

    def done(self, seconds: float | None) -> Iterator[tuple[int, Any]]:
        """Yield places and results of what was done within ``seconds`` (None: of all that is left).

        Raises:
            UserError, RunFailed: what the work raised, or that its nodes were lost again and again.
        """
        while self._of:
            ready, _ = self._ray.wait(list(self._of), num_returns=1, timeout=seconds)
            if not ready:
                return
            for reference in ready:
                place = self._of.pop(reference)
                yield place, self._result(reference, self._works[place])

    @property
    def left(self) -> int:
        """How many pieces are not done yet."""
        return len(self._of)

    def kill(self) -> None:
        """End what is not done."""
        for reference in self._of:
            with suppress(Exception):  # a node that is lost need not be told
                self._ray.cancel(reference, force=True)
        self._of.clear()

    def _result(self, reference: Any, work: Work) -> Any:
        try:
            error, result = self._ray.get(reference)
        except self._ray.exceptions.RayError as lost:
            raise RunFailed(f"{work.name}: the cluster could not do it ({type(lost).__name__}): {lost}") from None
        if error is not None:
            raise error
        return result


def spread(works: Sequence[Work], told: Callable[[int], None] = lambda done: None) -> list[Any]:
    """Do all work and return the results in its order; ``told`` how many are done. What ends this call ends the work."""
    work, results = Spread(works), {}
    try:
        for place, result in work.done(None):
            results[place] = result
            told(len(results))
    finally:
        work.kill()
    return [results[place] for place in range(len(works))]


def connected() -> Any:
    """Return the module ``ray``, connected to the cluster.

    Raises:
        UserError: there is none.
        ModuleNotFoundError: Ray is not installed.
    """
    import ray

    if not ray.is_initialized():
        try:
            _reach(os.environ.get(ADDRESS, ""))
            ray.init(address=os.environ.get(ADDRESS, "auto"), log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            named = f"{ADDRESS} {os.environ[ADDRESS]}: " if ADDRESS in os.environ else ""
            raise UserError(f"{named}no Ray cluster answers ({str(error).splitlines()[0]}); {HOW}") from None
    return ray


def _reach(address: str) -> None:
    """Raise OSError where nobody listens at ``host:port``: Ray itself would try for many minutes. Other forms are Ray's."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()


def _refuse_too_large(ray: Any, works: Sequence[Work]) -> None:
    """Refuse what would wait for ever for a node that has its memory."""
    largest = max(works, key=lambda work: work.memory, default=None)
    most = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if largest is not None and largest.memory > most:
        raise UserError(
            f"{largest.name} takes about {gibibytes(largest.memory)}, and the largest node of the cluster has "
            f"{gibibytes(int(most))} for it: add a node with more, or start Ray with --memory"
        )


def _call(function: str, arguments: tuple[Any, ...]) -> tuple[Exception | None, Any]:
    """Do a piece of work, on a node. What is the user's mistake goes back as it is, without Ray's traceback around it."""
    module, _, name = function.partition(":")
    try:
        return None, getattr(importlib.import_module(module), name)(*arguments)
    except (UserError, RunFailed) as error:
        return type(error)(*error.args), None
