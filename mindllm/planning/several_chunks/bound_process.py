"""The lower bound of interleaved plans, raised in a separate process while plans are searched."""

from __future__ import annotations

import contextlib
from typing import Any

from mindllm.deadline import OutOfTime, now
from mindllm.files import atomic_open
from mindllm.jobs.pool import Pool, Task
from mindllm.planning.plan import problem_orders
from mindllm.planning.problem import Problem
from mindllm.planning.several_chunks.layer_tree import LayerTree
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.schedules.orders import timetable


class BoundProcess:
    """A process that raises the bound until ``seconds`` have passed. A context, at whose end the process is killed."""

    def __init__(self, problem: Problem, best: float, proven: float, seconds: float) -> None:
        self._pool = Pool(1)
        self._file = self._pool.directory / "bound"
        self._bound = 0.0
        arguments = (problem.model_dump(mode="json"), best, proven, seconds)
        self._pool.submit(Task("lower bound", f"{__name__}:{raise_bound.__name__}", arguments, self._file))
        self._pool.poll()

    @property
    def bound(self) -> float:
        """The highest bound so far."""
        with contextlib.suppress(FileNotFoundError):
            self._bound = float(self._file.read_text(encoding="utf-8"))
        return self._bound

    @property
    def running(self) -> bool:
        """Whether the process may still raise the bound."""
        self._pool.poll()
        return self._pool.left > 0

    def __enter__(self) -> BoundProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._bound = self.bound
        self._pool.close()


def raise_bound(problem: dict[str, Any], best: float, proven: float, seconds: float, output: str) -> None:
    """Write each higher bound to ``output``: a task."""

    def write(bound: float) -> None:
        with atomic_open(output) as file:
            file.write(repr(bound))

    deadline = now() + seconds
    tree = build_tree(Problem.model_validate(problem), best, proven, deadline)
    with contextlib.suppress(OutOfTime):
        tree.bound(deadline, write)


def build_tree(problem: Problem, best: float, proven: float, deadline: float) -> LayerTree:
    """Return a tree that looks for plans below ``best``, with the times of whole layers on each stage."""
    program = PathProgram(problem, timetable(problem_orders(problem), problem.chunks))
    program.deadline = deadline
    program.add_stage_floors(best, deadline)
    return LayerTree(program, best, proven)
