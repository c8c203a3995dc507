"""The lower bound of interleaved plans in a process of its own, beside the search for plans."""

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
    """A process that raises ``bound`` as long as it lives; a context, at whose end it is stopped."""

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
        """Beside the search: a long question is read when the process has started, which may take seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:
            stream.write(question)
        for line in self._process.stdout:
            self.bound = max(self.bound, float(line))

    @property
    def running(self) -> bool:
        """Whether it may still raise the bound."""
        return self._reader.is_alive()

    def __enter__(self) -> BoundProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


def tree_of(problem: Problem, best: float, proven: float, deadline: float) -> LayerTree:
    """A tree that beats ``best``, with what whole layers take of each stage known."""
    program = PathProgram(problem, timetable(problem_orders(problem), problem.chunks))
    program.deadline = deadline
    program.whole_stages(best, deadline)
    return LayerTree(program, best, proven)


def main() -> None:
    """Reads a question from the standard input and prints every rise of the bound, and nothing else, whatever libraries print."""
    started = now()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    deadline = started + question["seconds"]
    problem = Problem.model_validate(question["problem"])
    tree = tree_of(problem, question["best"], question["proven"], deadline)
    with contextlib.suppress(OutOfTime):
        tree.bound(deadline, lambda bound: print(bound, file=answers, flush=True))


if __name__ == "__main__":
    main()
