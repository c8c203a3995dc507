"""The lower bound of interleaved plans in a process of its own, beside the search for plans."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindllm.planning.deadline import OutOfTime
from mindllm.planning.plan import orders_of
from mindllm.planning.problem import Problem
from mindllm.planning.schedules.orders import timetable
from mindllm.planning.several_chunks.layer_tree import LayerTree
from mindllm.planning.several_chunks.path_program import PathProgram
from mindllm.planning.several_chunks.whole_layers import WholeLayers

MODULE = "mindllm.planning.several_chunks.bound_process"
SPLITS = 8  # that wait to be looked at; older ones are forgotten
SLICE = 2.0  # seconds of each way before the other's turn
REFUTING = 0.35  # share of the time for steps that are refuted as a whole


class BoundProcess:
    """A process that raises ``bound`` as long as it lives; a context, at whose end it is stopped.

    Attributes:
        bound: the highest so far.
        splits: layers of each place of answers on the way, ``[places]``: good plans may have them.
    """

    def __init__(self, problem: Problem, best: float, proven: float, seconds: float) -> None:
        self.bound = 0.0
        self.splits: deque[np.ndarray] = deque(maxlen=SPLITS)
        packages = str(Path(__file__).resolve().parents[3])
        search = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": search},
        )
        assert self._process.stdin is not None
        question = {"problem": problem.model_dump(mode="json"), "best": best, "proven": proven, "seconds": seconds}
        with self._process.stdin as stream:
            stream.write(json.dumps(question))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = json.loads(line)
            if isinstance(found, list):
                self.splits.append(np.array(found))
            else:
                self.bound = max(self.bound, found)

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
    program = PathProgram(problem, timetable(orders_of(problem), problem.chunks))
    program.deadline = deadline
    program.whole_stages(best, deadline)
    return LayerTree(program, best, proven)


def prove(
    tree: LayerTree,
    deadline: float,
    tell: Callable[[float], None],
    offer: Callable[[np.ndarray], None] = lambda _: None,
) -> None:
    """Raises the bound in turn by mixed-integer programs and by the tree, each with half of the time; reports every rise.

    ``offer`` is given the splits of answers on the way.
    """
    tree.begin(deadline, tell)
    if tree.reported >= tree.enough:
        return
    whole = WholeLayers(tree.program.twin(), tree.box, tree.enough)
    whole.bound = tree.reported

    def ask(until: float) -> None:
        while time.monotonic() < min(until, deadline) and not whole.ended:
            split = whole.ask(deadline)
            tell(whole.bound)
            if split is not None:
                offer(split)

    ask(time.monotonic() + SLICE)
    if whole.bound < tree.enough:
        tree.refute(time.monotonic() + REFUTING * (deadline - time.monotonic()), tell)
        whole.box = tree.box
    asked = divided = 0.0  # seconds
    while not tree.ended and max(whole.bound, tree.reported) < tree.enough and time.monotonic() < deadline:
        begun = time.monotonic()
        if asked <= divided and not whole.ended:
            ask(begun + SLICE)
            asked += time.monotonic() - begun
        else:
            tree.divide(min(deadline, begun + SLICE), tell)
            divided += time.monotonic() - begun


def main() -> None:
    """Reads a question from the standard input; prints every rise of the bound, and the splits on the way."""
    started = time.monotonic()
    question = json.load(sys.stdin)
    deadline = started + question["seconds"]
    problem = Problem.model_validate(question["problem"])

    def say(found: object) -> None:
        print(json.dumps(found), flush=True)

    with contextlib.suppress(OutOfTime):
        tree = tree_of(problem, question["best"], question["proven"], deadline)
        prove(tree, deadline, say, lambda split: say(split.tolist()))


if __name__ == "__main__":
    main()
