"""The memory of a pipeline stage taken apart, from its simulation: what stays, what micro-batches keep, the two peaks.

In 1F1B (Narayanan et al., 2021) a stage runs forward for as many micro-batches as it keeps alive, then backward and forward in
turn. Weights that are gathered or cast, and masks, are made by the first micro-batch and read by all. So what one micro-batch
keeps is read off a later one: the blocks made in its forward pass that are still there when a backward pass begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from mindllm.compiled.simulation.simulation import Block, Simulation, Task

KERNEL, RECEIVE = "Kernel", "Receive"


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank of a stage.

    Attributes:
        stays: weights, optimizer state, accumulators, constants: there during the whole step.
        shared: beyond that, there for all micro-batches: gathered and cast weights, masks.
        kept: of one micro-batch between its forward and its backward pass.
        alive: micro-batches whose forward pass is over when the first backward pass begins.
        passes: the largest use while layers run, ``stays`` included.
        ends: the largest use before they begin and after they have ended (the update), likewise.
        gaps: that the pool leaves between blocks at its peak.
    """

    stays: int
    shared: float
    kept: float
    alive: int
    passes: int
    ends: int
    gaps: int


@dataclass(frozen=True)
class _Run:
    """The tasks of a step and those inside layers, with the numbers of these."""

    tasks: Sequence[Task]
    inside: Sequence[tuple[Task, int]]
    micro_batches: int
    alive: int

    @property
    def begin(self) -> int:
        return self.inside[0][0].time

    @property
    def end(self) -> int:
        return self.inside[-1][0].time

    def turn(self) -> int:
        """When the first backward pass begins: on the last stage in the loss, on others with what they receive."""
        return next(task.time for task in self.tasks if task.backward and task.time > self.begin)

    def later_turn(self, turn: int) -> int | None:
        """When the backward pass of the second micro-batch begins: with the operator the first one began with."""
        first = next(task for task in self.tasks if task.time == turn)
        alike = [task.time for task in self.tasks if _place(task) == _place(first)]
        each, rest = divmod(len(alike), self.micro_batches)
        return alike[each] if not rest and self.micro_batches > 1 else None

    def starts(self, turn: int) -> list[int] | None:
        """When each forward pass before the first backward one begins; None where it is not 1F1B."""
        first = self.inside[0][0]
        alike = [task.time for task, _ in self.inside if _place(task) == _place(first) and task.time < turn]
        each, rest = divmod(len(alike), self.alive)
        return None if rest or not each else alike[::each]


def stage_memory(simulation: Simulation, layers: str, micro_batches: int, stages: int) -> StageMemory | None:
    """Takes the memory of a rank apart; None where its layers do not run as 1F1B has them.

    Args:
        layers: the list of cells that are the layers, as ``decoder.layers``; further cells may be around it.
    """
    alive = min(micro_batches, stages - simulation.stage)
    inside = [(task, number) for task in simulation.tasks if (number := _number(task.path, layers)) is not None]
    if not any(task.backward for task, _ in inside):
        return None
    run = _Run(simulation.tasks, inside, micro_batches, alive)
    kept = _kept(simulation, run)
    if kept is None:
        return None
    use = simulation.memory_over_time()
    stays = sum(block.size for block in simulation.blocks if _stays(block, run.begin))
    turn = run.turn()
    return StageMemory(
        stays=stays,
        shared=max(0.0, _largest(use, turn, turn) - stays - alive * kept),
        kept=kept,
        alive=alive,
        passes=_largest(use, run.begin, run.end),
        ends=max(_largest(use, None, run.begin - 1), _largest(use, run.end + 1, None)),
        gaps=max(0, simulation.actual_peak - simulation.used_peak),
    )


def _place(task: Task) -> tuple[str, str, bool]:
    return task.path, task.operator, task.backward


def _number(path: str, layers: str) -> int | None:
    """The layer a cell path is in."""
    before, found, behind = path.partition(f"{layers}.")
    if not found or (before and not before.endswith(".")):
        return None
    number = behind.partition(".")[0]
    return int(number) if number.isdigit() else None


def _stays(block: Block, begin: int) -> bool:
    return block.end is None and (block.start < begin or block.kind != KERNEL)


def _kept(simulation: Simulation, run: _Run) -> float | None:
    """Bytes that a micro-batch keeps, but the first, which makes what all read."""
    turn = run.turn()
    starts = run.starts(turn)
    if starts is None:
        return None
    if run.alive > 1:  # from the end of the first forward pass on
        first = max(task.time for task, _ in run.inside if task.time < starts[1])
        return _made(simulation, first, turn) / (run.alive - 1)
    later = run.later_turn(turn)
    if later is None:  # one micro-batch
        return float(_made(simulation, run.begin - 1, turn))
    first = max(task.time for task, _ in run.inside if task.backward and task.time < later)
    received = (block for block in simulation.blocks if block.operator == RECEIVE and turn < block.start <= first)
    return float(_made(simulation, first, later) + sum(block.size for block in received if _alive(block, later)))


def _made(simulation: Simulation, after: int, before: int) -> int:
    """Bytes of the blocks that are made in between and outlive it."""
    return sum(block.size for block in simulation.blocks if after < block.start < before and _alive(block, before))


def _alive(block: Block, time: int) -> bool:
    return block.end is not None and block.end > time


def _largest(use: Sequence[tuple[int, int]], first: int | None, last: int | None) -> int:
    """The largest use between two times, both included, of points (time, use from then on)."""
    times = [time for time, _ in use]
    start = 0 if first is None else max(0, bisect_right(times, first) - 1)
    stop = len(use) if last is None else bisect_right(times, last)
    return max((size for _, size in use[start:stop]), default=0)
