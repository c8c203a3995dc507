"""The judge of plans: when every operation of a schedule starts and ends, and what that means for time, bubble and memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindllm.schedules.operations import BACKWARD, FORWARD, KINDS, WEIGHT
from mindllm.schedules.orders import Timetable


def end_times(table: Timetable, times: np.ndarray, delay: float | np.ndarray = 0.0) -> np.ndarray:
    """Return the end of every operation of many plans.

    Args:
        table: the operations in levels.
        times: by kind of operation of the schedule (forward, backward; gradients of weights, of inputs) and place,
            ``[2 or 4, places, plans]``.
        delay: of a tensor to another stage; one for all plans, or ``[plans]``.

    Returns:
        ``[operations, plans]``, in the order of ``table``.
    """
    durations = times.reshape(-1, times.shape[-1])
    places = table.stages * table.chunks
    ends = np.zeros((table.size + 1, durations.shape[1]))
    index = table.what * places + table.place
    lags = table.remote[:, None] * delay if np.any(delay) else None
    for start, stop in zip(table.starts, table.starts[1:], strict=False):
        incoming = ends[table.incoming[start:stop]]
        if lags is not None:
            incoming += lags[start:stop]
        np.maximum(incoming, ends[table.same_stage[start:stop]], out=incoming)
        np.add(incoming, durations[index[start:stop]], out=ends[start:stop])
    return ends[:-1]


def step_times(table: Timetable, times: np.ndarray, delay: float | np.ndarray = 0.0) -> np.ndarray:
    """Time from the first start to the last end, ``[plans]``; arguments as :func:`end_times`."""
    return end_times(table, times, delay).max(axis=0)


def pass_times(
    forward: np.ndarray, backward: np.ndarray, weight: np.ndarray, again: float | np.ndarray = 0.0
) -> np.ndarray:
    """Times by kind of operation, ``[KINDS, ...]``, from those of passes, of any one shape.

    ``backward`` has the gradients of weights in it, which take ``weight`` alone; of it ``again`` is what both halves of a
    backward pass do, as MindSpore computes layers again in each.
    """
    return np.stack([forward, backward, weight, backward - weight + again])


@dataclass(frozen=True)
class Timeline:
    """One simulated step.

    Attributes:
        table: the operations.
        start, end: times of each, ``[operations]``.
        repeated: micro-batches that are left out because they repeat the steady state.
        period: time by which each of them lengthens the step.
    """

    table: Timetable
    start: np.ndarray
    end: np.ndarray
    repeated: int = 0
    period: float = 0.0

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return float(self.end.max()) + self.repeated * self.period

    def busy(self) -> np.ndarray:
        """Time each stage computes, ``[stages]``."""
        weights = (self.end - self.start) * (1 + self.repeated * (self.table.micro == 0))
        return np.bincount(self.table.place % self.table.stages, weights=weights, minlength=self.table.stages)

    def bubble(self) -> np.ndarray:
        """Share of the step in which each stage waits, ``[stages]``."""
        return 1 - self.busy() / self.makespan

    def memory_curve(self, stage: int, activation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the activations of a stage over time: times, and MB from each on.

        ``activation`` is that of a micro-batch of each chunk. It is held from the start of the forward pass to the end of
        the last backward operation. An operation frees its activations before the next one allocates, independent of rounding.
        """
        mine = np.flatnonzero(self.table.place % self.table.stages == stage)  # in the order of the stage
        forward = self.table.what[mine] == FORWARD
        last = np.isin(self.table.what[mine], (BACKWARD, WEIGHT))
        changing = forward | last
        amounts = activation[self.table.place[mine] // self.table.stages] * np.where(forward, 1, -1)
        return np.where(forward, self.start[mine], self.end[mine])[changing], amounts[changing].cumsum()


def simulate(
    table: Timetable,
    forward: np.ndarray,
    backward: np.ndarray,
    weight: np.ndarray | None = None,
    delay: float = 0.0,
    again: float | np.ndarray = 0.0,
) -> Timeline:
    """Simulate one plan with times per place, ``[places]``, as in :func:`pass_times`; ``weight`` None: whole backward passes."""
    passes = np.stack([forward, backward])
    return simulate_times(table, passes if weight is None else pass_times(forward, backward, weight, again), delay)


def simulate_times(table: Timetable, times: np.ndarray, delay: float = 0.0) -> Timeline:
    """Simulate one plan; ``times`` by kind of operation and place, ``[2 or 4, places]``."""
    durations = times.ravel()
    end = end_times(table, times[..., None], delay)[:, 0]
    places = table.stages * table.chunks
    return Timeline(table, end - durations[table.what * places + table.place], end)


def critical_path(line: Timeline, delay: float = 0.0) -> tuple[np.ndarray, int]:
    """Return how often the longest chain of operations passes each place.

    Returns:
        Visits by kind of operation, ``[KINDS, places]``, and the number of tensors of the chain between stages. For any
        times of the same order, the sum over the visits is a lower bound of the step.
    """
    table, ends = line.table, np.append(line.end, -np.inf)
    visits = np.zeros((KINDS, table.stages * table.chunks), int)
    crossings, operation = 0, int(line.end.argmax())
    while operation < table.size:
        visits[table.what[operation], table.place[operation]] += 1
        previous, source = table.same_stage[operation], table.incoming[operation]
        if ends[source] + delay * table.remote[operation] >= ends[previous] and source < table.size:
            crossings += int(table.remote[operation])
            operation = int(source)
        else:
            operation = int(previous)
    return visits, crossings
