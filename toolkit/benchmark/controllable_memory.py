"""Orders of a V within a memory limit, beside those of the schedulers that Qi et al. published, on the same costs and memory.

    python -m toolkit.benchmark.controllable_memory --theirs DIR

``DIR`` is a checkout of sail-sg/zero-bubble-pipeline-parallelism, whose schedulers run as they are: ``zbv_greedy.py`` (V-min and
V-half), ``zbv.py`` (any limit) and ``v_auto_schedule.py`` (building blocks, any limit). Both orders are judged by our simulator,
from the first start to the last end; memory counts passes that a stage keeps from forward pass to gradients of weights. Of V-min
and V-half the limit is what their order needs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.planning.zero_bubble.folded_bound import folded_bound
from mindllm.planning.zero_bubble.folded_orders import FoldedCosts, folded_orders
from mindllm.schedules.operations import FORWARD, INPUT, WEIGHT
from mindllm.schedules.orders import Orders, alive, timetable
from mindllm.schedules.simulate import simulate_times

PACKAGE = "megatron.core.pipeline_parallel.zerobubble.scheduler"
KINDS = {"F": FORWARD, "B": INPUT, "W": WEIGHT}
SIZES = ((4, 8), (4, 16), (8, 16), (8, 32))
TIMES = {"equal": (1, 1, 1, 0), "measured": (18522, 18086, 9337, 601)}
"""Of a forward pass, gradients of inputs and of weights, and of a tensor between stages; the latter from their repository."""
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
    theirs: Theirs, name: str, sizes: tuple[int, int], times: Sequence[int]
) -> tuple[int, float, float, float]:
    """The limit, and their step, ours and the bound as shares of the work of a stage."""
    stages, micro = sizes
    forward, backward, weight, delay = times
    limit = {"zbv": 2 * stages, "blocks, p + 1": stages + 1, "blocks, 3p / 2": 3 * stages // 2}.get(name, 0)
    other = theirs.orders(name, sizes, times, limit)
    limit = limit or max(int(held.sum(axis=1).max()) for held in alive(other, 2))
    one = np.ones((2, stages))
    costs = FoldedCosts(forward * one, backward * one, weight * one, one, np.full(stages, float(limit)), delay)
    work = 2 * micro * (forward + backward + weight)
    steps = [
        simulate_times(timetable(orders, 2), costs.times, costs.delay).makespan
        for orders in (other, folded_orders(costs, micro))
    ]
    return limit, steps[0] / work, steps[1] / work, folded_bound(costs, micro) / work


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--theirs", type=Path, required=True, help="checkout of sail-sg/zero-bubble-pipeline-parallelism"
    )
    theirs = Theirs(parser.parse_args(arguments).theirs)
    sys.setrecursionlimit(100_000)  # their timing is a recursion over operations
    print("| stages, micro-batches | times | scheduler | limit | theirs | ours | less time | bound |")
    print("|---|---|---|---|---|---|---|---|")
    counts = [0, 0, 0]
    for sizes in SIZES:
        for label, times in TIMES.items():
            for name in ("min", "half", "zbv", "blocks, p + 1", "blocks, 3p / 2"):
                limit, other, own, bound = compared(theirs, name, sizes, times)
                counts[0 if own < other * (1 - EVEN) else 1 if own <= other * (1 + EVEN) else 2] += 1
                cells = (f"{other:.4f}", f"{own:.4f}", f"{100 * (1 - own / other):+.2f}%", f"{bound:.4f}")
                print(f"| {sizes[0]}, {sizes[1]} | {label} | {name} | {limit} | {' | '.join(cells)} |")
    print(f"\nshorter {counts[0]}, as long {counts[1]}, longer {counts[2]}")


if __name__ == "__main__":
    main()
