"""Orders of a V within a memory limit, beside those of the schedulers that Qi et al. published, on the same costs and memory.

    python -m toolkit.benchmark.controllable_memory --theirs DIR [--cases tuned|unseen] [--seconds 20]

``DIR`` is a checkout of sail-sg/zero-bubble-pipeline-parallelism, whose schedulers run as they are: ``zbv_greedy.py`` (V-min and
V-half), ``zbv.py`` (any limit) and ``v_auto_schedule.py`` (building blocks, any limit). Both orders are judged by our simulator,
from the first start to the last end; memory counts passes that a stage keeps from forward pass to gradients of weights. Of V-min
and V-half the limit is what their order needs.

Our search was made and tuned on the cases ``tuned``. Those of ``unseen`` have other stages, micro-batches and times; nothing was
chosen by them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import math
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.deadline import now
from mindllm.planning.zero_bubble.folded_bound import folded_bound
from mindllm.planning.zero_bubble.folded_costs import FoldedCosts
from mindllm.planning.zero_bubble.folded_orders import folded_orders
from mindllm.schedules.operations import FORWARD, INPUT, WEIGHT
from mindllm.schedules.orders import Orders, alive, timetable
from mindllm.schedules.simulate import simulate_times
from mindllm.terminal.console import output

PACKAGE = "megatron.core.pipeline_parallel.zerobubble.scheduler"
KINDS = {"F": FORWARD, "B": INPUT, "W": WEIGHT}
EQUAL, MEASURED = (1, 1, 1, 0), (18522, 18086, 9337, 601)
"""Times of a forward pass, gradients of inputs, of weights, and of a tensor between stages; the latter from their repository."""


def random_times(seed: int) -> tuple[int, ...]:
    """Passes of 5,000 to 20,000, and up to 2,000 between stages."""
    random = np.random.default_rng(seed)
    return (*map(int, random.integers(5_000, 20_000, 3)), int(random.integers(0, 2_000)))


CASES: dict[str, tuple[tuple[tuple[int, int], ...], dict[str, tuple[int, ...]]]] = {
    "tuned": (((4, 8), (4, 16), (8, 16), (8, 32)), {"equal": EQUAL, "measured": MEASURED}),
    "unseen": (
        ((6, 13), (10, 20)),
        {
            "equal": EQUAL,
            "measured": MEASURED,
            "random 1": random_times(1),
            "random 2": random_times(2),
            "random 3": random_times(3),
        },
    ),
}
"""Stages and micro-batches, and times, of each set."""
SCHEDULERS = ("min", "half", "zbv", "blocks, p + 1", "blocks, 3p / 2")
EVEN = 1e-9


class Theirs:
    """Their schedulers, loaded without Megatron-LM, which they do not need."""

    def __init__(self, directory: Path) -> None:
        names = PACKAGE.split(".")
        for size in range(1, len(names) + 1):
            package = types.ModuleType(".".join(names[:size]))
            package.__path__ = []
            sys.modules[package.__name__] = package
        self.directory = directory / PACKAGE.replace(".", "/")
        self._load("graph")
        self.greedy, self.zbv, self.blocks = (self._load(name) for name in ("zbv_greedy", "zbv", "v_auto_schedule"))

    def _load(self, name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", self.directory / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def orders(self, name: str, sizes: tuple[int, int], times: Sequence[int], limit: int) -> Orders:
        """What they do; without what they print."""
        stages, micro = sizes
        config = types.SimpleNamespace(max_chunks=2, n_stages=stages, n_micro=micro)
        with contextlib.redirect_stdout(io.StringIO()):
            if name in ("min", "half"):
                rows = self.greedy.PipelineGraph(stages, micro, name, *times).create_schedule(config)
            elif name == "zbv":
                rows = self.zbv.PipelineGraph(stages, micro, *times, 1, 0, -1, limit).create_schedule(config)
            else:
                blocks = self.blocks.schedule(stages, micro, times, limit)
                return Orders(
                    (tuple((KINDS[n.type], int(n.chunk), n.minibatch) for n in r) for r in blocks), v_shape=True
                )
        return Orders((tuple((KINDS[n.type.value], n.chunk, n.microbatch) for n in row) for row in rows), v_shape=True)


def compared(
    theirs: Theirs, name: str, sizes: tuple[int, int], times: Sequence[int], seconds: float = math.inf
) -> tuple[int, float, float, float, float]:
    """The limit; their step, ours and the bound as shares of the work of a stage; the seconds of ours."""
    stages, micro = sizes
    forward, backward, weight, delay = times
    limit = {"zbv": 2 * stages, "blocks, p + 1": stages + 1, "blocks, 3p / 2": 3 * stages // 2}.get(name, 0)
    other = theirs.orders(name, sizes, times, limit)
    limit = limit or max(int(held.sum(axis=1).max()) for held in alive(other, 2))
    one = np.ones((2, stages))
    costs = FoldedCosts(forward * one, backward * one, weight * one, one, np.full(stages, float(limit)), delay)
    work = 2 * micro * (forward + backward + weight)
    start = now()
    own = folded_orders(costs, micro, deadline=start + seconds)
    took = now() - start
    steps = [simulate_times(timetable(orders, 2), costs.times, costs.delay).makespan / work for orders in (other, own)]
    return limit, steps[0], steps[1], folded_bound(costs, micro) / work, took


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--theirs", type=Path, required=True, help="checkout of sail-sg/zero-bubble-pipeline-parallelism"
    )
    parser.add_argument("--cases", choices=tuple(CASES), default="tuned", help="those it was tuned on, or others")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="for an order of ours; without it, by effort alone"
    )
    options = parser.parse_args(arguments)
    theirs = Theirs(options.theirs)
    sys.setrecursionlimit(100_000)  # their timing is a recursion over operations
    output.print("| stages, micro-batches | times | scheduler | limit | theirs | ours | less time | bound | seconds |")
    output.print("|---|---|---|---|---|---|---|---|---|")
    counts = [0, 0, 0]
    every_size, every_times = CASES[options.cases]
    for sizes, (label, times), name in itertools.product(every_size, every_times.items(), SCHEDULERS):
        limit, other, own, bound, seconds = compared(theirs, name, sizes, times, options.seconds)
        counts[0 if own < other * (1 - EVEN) else 1 if own <= other * (1 + EVEN) else 2] += 1
        cells = (f"{other:.4f}", f"{own:.4f}", f"{100 * (1 - own / other):+.2f}%", f"{bound:.4f}", f"{seconds:.0f}")
        output.print(f"| {sizes[0]}, {sizes[1]} | {label} | {name} | {limit} | {' | '.join(cells)} |")
    output.print(f"\nshorter {counts[0]}, as long {counts[1]}, longer {counts[2]}")


if __name__ == "__main__":
    main()
