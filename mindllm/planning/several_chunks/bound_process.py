"""The lower bound of interleaved plans in a separate process, parallel to the search for plans."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading

from mindllm.deadline import OutOfTime, now
from mindllm.planning.plan import problem_orders
from mindllm.planning.problem import Problem
from mindllm.planning.several_chunks.layer_tree import LayerTree
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.schedules.orders import timetable
from mindllm.sources import python_path

MODULE = "mindllm.planning.several_chunks.bound_process"


class BoundProcess:
    """A process that raises ``bound`` until the context ends."""

    def __init__(self, problem: Problem, best: float, proven: float, seconds: float) -> None:
        self.bound = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        question = {"problem": problem.model_dump(mode="json"), "best": best, "proven": proven, "seconds": seconds}
        self._reader = threading.Thread(target=self._ask, args=(json.dumps(question),), daemon=True)
        self._reader.start()

    def _ask(self, question: str) -> None:
        """Send the problem and read bounds in a thread: the process may take seconds to start."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:
            stream.write(question)
        for line in self._process.stdout:
            self.bound = max(self.bound, float(line))

    @property
    def running(self) -> bool:
        """Whether the bound may still rise."""
        return self._reader.is_alive()

    def __enter__(self) -> BoundProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


def build_tree(problem: Problem, best: float, proven: float, deadline: float) -> LayerTree:
    """Return a tree that looks for plans below ``best``, with the times of whole layers on each stage."""
    program = PathProgram(problem, timetable(problem_orders(problem), problem.chunks))
    program.deadline = deadline
    program.add_stage_floors(best, deadline)
    return LayerTree(program, best, proven)


def main() -> None:
    """Read a problem from standard input and print every rise of the bound; output of libraries goes to standard error."""
    started = now()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    deadline = started + question["seconds"]
    problem = Problem.model_validate(question["problem"])
    tree = build_tree(problem, question["best"], question["proven"], deadline)
    with contextlib.suppress(OutOfTime):
        tree.bound(deadline, lambda bound: print(bound, file=answers, flush=True))


if __name__ == "__main__":
    main()
