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
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from mindllm.errors import RunFailed, UserError, nearest
from mindllm.files import atomic_open
from mindllm.jobs.memory import gibibytes
from mindllm.jobs.pool import POLL_SECONDS, Outcome, Task
from mindllm.process.temporary import temporary_directory
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


class RayPool:
    """Runs tasks on the nodes of a Ray cluster, as :class:`Pool` does on this machine. Results arrive in any order.

    Raises:
        UserError: there is no cluster.
    """

    def __init__(self) -> None:
        self._ray = connected()
        self._tasks: dict[Any, Task] = {}

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the tasks that have not ended."""
        for reference in self._tasks:
            with suppress(Exception):  # its node may be lost
                self._ray.cancel(reference, force=True)
        self._tasks.clear()

    def submit(self, task: Task) -> None:
        """Give a task to the cluster; raise UserError if no node has memory for it."""
        _require_memory(self._ray, task)
        remote = self._ray.remote(max_retries=RETRIES, num_cpus=1)(_call)
        environment = {"PYTHONPATH": python_path(), VARIABLE: LOCAL, **task.environment}
        options = {"memory": task.memory, "runtime_env": {"env_vars": environment}}
        reference = remote.options(**options).remote(task.function, task.arguments, task.output is not None)
        self._tasks[reference] = task

    @property
    def running(self) -> list[Task]:
        """Tasks that have not ended."""
        return list(self._tasks.values())

    @property
    def left(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._tasks)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the outcome of each task as it ends, until none is left."""
        while self.left:
            yield from self.poll(None)

    def wait(self) -> None:
        """Wait for a moment, in which tasks may end."""
        self._ray.wait(list(self._tasks), num_returns=1, timeout=POLL_SECONDS)

    def poll(self, seconds: float | None = 0) -> list[Outcome]:
        """Return the tasks that have ended, after waiting up to ``seconds`` for one (None: until one ends).

        Raises:
            UserError, RunFailed: the error of a task, or its nodes were lost repeatedly.
        """
        if not self._tasks:
            return []
        ready, _ = self._ray.wait(
            list(self._tasks), num_returns=len(self._tasks) if seconds == 0 else 1, timeout=seconds
        )
        return [self._outcome(reference) for reference in ready]

    def _outcome(self, reference: Any) -> Outcome:
        task = self._tasks.pop(reference)
        try:
            error, value = self._ray.get(reference)
        except self._ray.exceptions.RayError as lost:
            raise RunFailed(f"{task.name}: the cluster could not do it ({type(lost).__name__}): {lost}") from None
        if error is not None:
            raise error
        if task.output is not None:
            with atomic_open(task.output, "wb") as file:
                file.write(value)
        return Outcome(task, 0, value=value)


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


def _require_memory(ray: Any, task: Task) -> None:
    """Raise UserError if no node has the memory for a task, which would wait forever."""
    largest = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if task.memory > largest:
        raise UserError(
            f"{task.name} takes about {gibibytes(task.memory)}, and the largest node of the cluster has "
            f"{gibibytes(int(largest))} for it: add a node with more, or start Ray with --memory"
        )


def _call(function: str, arguments: tuple[Any, ...], has_output: bool) -> tuple[Exception | None, Any]:
    """Run a task on a node; return its value, or the content of its output. Errors of the user return without Ray's traceback."""
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    try:
        if not has_output:
            return None, call(*arguments)
        with temporary_directory("mindllm_task_") as directory:
            call(*arguments, str(directory / "output"))
            return None, (directory / "output").read_bytes()
    except (UserError, RunFailed) as error:
        return type(error)(*error.args), None
