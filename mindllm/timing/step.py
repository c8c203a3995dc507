"""How long a training step takes on a device: every stage from its operators, their schedule from the pipeline's simulator.

    step = schedule of all passes + exchanges between replicas that nothing hides + update + what a step costs beside

Exchanges between replicas run behind the last backward pass as far as the device's ``overlap`` goes. Where sends block a stage
(Megatron-LM's schedules wait for them) they lengthen its passes; otherwise they only delay the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mindllm.architecture.parts import SPLIT_INPUT
from mindllm.axes import CONTEXT, TENSOR
from mindllm.schedules.orders import Timetable, stage_orders, timetable
from mindllm.schedules.simulate import Timeline, step_times
from mindllm.schedules.steady import SCHEDULE, is_long
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.costs.feed_forward import sends_tokens
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.swapped import late_seconds, moved_bytes
from mindllm.timing.costs.tuned_update import uncounted_update
from mindllm.timing.costs.work import Exchange, Operator, Work
from mindllm.timing.device import Device
from mindllm.timing.pass_times import PassTimes
from mindllm.timing.step_work import Part, StageUpdate, StepWork, step_work, uncounted_patterns
from mindllm.timing.workload import Strategy, Workload

REPEATED, HOST, COPIES = "recomputation", "host", "copies of the host"
SUMS = ("AllReduce", "ReduceScatter")
PUT_TOGETHER = (
    "keys and values of pieces, which are put behind those of earlier pieces, and that later pieces see more of them"
)
UNEVEN = "tokens that a router sends some ranks more of than others (moe_token_dispatcher_type: alltoall)"
ORDERED = 2  # copies, or parts of rows, whose exchanges MindSpore orders behind each other's computing


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of a micro-batch: seconds by class of operator, and by kind of exchange."""

    compute: Mapping[str, float] = field(default_factory=dict)
    exchanged: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def seconds(self) -> float:
        return sum(self.compute.values()) + sum(self.exchanged.values())


@dataclass(frozen=True)
class StageEnd:
    """What a stage does once per step: exchanges between replicas that nothing hides, those that are hidden, the update."""

    exposed: float
    hidden: float
    update: float

    @property
    def seconds(self) -> float:
        return self.exposed + self.update


@dataclass(frozen=True)
class StepTime:
    """A predicted step; times are seconds, passes are by place (chunk x stages + stage); ``line`` is the schedule."""

    workload: Workload
    device: Device
    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    send: float
    ends: tuple[StageEnd, ...]
    times: PassTimes
    line: Timeline

    @cached_property
    def seconds(self) -> float:
        """The whole step."""
        return self.line.makespan * self.workload.strategy.accumulation + _once(self.ends, self.device)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """What takes time in a step and is not in its seconds."""
        strategy = self.workload.strategy
        pieces = (PUT_TOGETHER,) if strategy.pieces > 1 else ()
        uneven = (
            (UNEVEN,)
            if any(sends_tokens(spec.feed_forward, strategy) for spec in self.workload.architecture.layers)
            else ()
        )
        return (*uncounted_update(self.workload), *uncounted_patterns(self.workload), *pieces, *uneven)

    @property
    def tokens_per_device(self) -> float:
        """Tokens a second and device."""
        return self.workload.tokens / self.seconds / self.workload.strategy.device_num

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al., 2022): without what is computed again, attention not halved."""
        ranks = self.workload.strategy.device_num
        peak = self.device.of_ranks(ranks).matrix_rate(self.workload.numerics.compute) * ranks
        return self.workload.model_flops / self.seconds / peak


def step_time(workload: Workload, device: Device) -> StepTime:
    """Predicts a step.

    Raises:
        UserError: the device lacks a figure or a link that the run needs.
    """
    timed = TimedWork(step_work(workload), device)
    times = timed.pass_times
    return StepTime(workload, device, timed.forward, timed.backward, timed.send, timed.ends, times, times.simulated())


def step_seconds(workload: Workload, devices: Sequence[Device]) -> np.ndarray:
    """Seconds of a step on each of several devices, ``[devices]``, as :func:`step_time`, but simulated together."""
    table = _table(workload)
    if table is None:
        return np.array([step_time(workload, device).seconds for device in devices])
    timed = [TimedWork(step_work(workload), device) for device in devices]
    times = np.stack([one.durations for one in timed], axis=-1)
    schedule = step_times(table, times, np.array([one.delay for one in timed]))
    return schedule * workload.strategy.accumulation + np.array([_once(one.ends, one.device) for one in timed])


def _once(ends: Sequence[StageEnd], device: Device) -> float:
    return max(end.seconds for end in ends) + device.step_overhead.value


def _table(workload: Workload) -> Timetable | None:
    """The operations of a step; None where a steady state stands for most of them, or backward passes come in halves."""
    stages, chunks, micro = workload.plan.stages, workload.plan.chunks, workload.strategy.micro_batches
    steady = chunks == 1 and workload.strategy.schedule == SCHEDULE and is_long(stages, micro)
    if steady or workload.plan.v_shape:
        return None
    orders = stage_orders(workload.strategy.schedule, stages, chunks, micro, workload.strategy.pieces)
    return timetable(orders, chunks)


def groups(strategy: Strategy) -> dict[str, Group]:
    """The group of a rank along each axis of the mesh: tensor-parallel ranks are neighbours, stages are furthest apart.

    Ranks of a sequence come next to them; to gradients they are replicas like the others.

    To experts a stage is (replica, ep, etp), the last of them neighbours.
    """
    experts = strategy.expert_parallel * strategy.expert_tensor_parallel
    return {
        "tp": Group(strategy.size(TENSOR)),
        "cp": Group(strategy.size(CONTEXT), strategy.size(TENSOR)),
        "dp": Group(strategy.replica_num, strategy.model_parallel),
        **_shares("", strategy, strategy.replica_num, strategy.model_parallel),
        "pp": Group(2, strategy.model_parallel * strategy.replica_num),
        "etp": Group(strategy.expert_tensor_parallel),
        "ep": Group(strategy.expert_parallel, strategy.expert_tensor_parallel),
        "ep over cp": Group(
            strategy.expert_parallel // strategy.size(CONTEXT),
            experts // strategy.expert_parallel * strategy.size(CONTEXT),
        ),
        "stage share": Group(strategy.shards(strategy.stage_device_num)),
        "tp and share": Group(strategy.size(TENSOR) * strategy.shards(strategy.replica_num)),
        "all": Group(strategy.device_num),
        "replica": Group(strategy.expert_replicas, experts),
        **_shares("expert ", strategy, strategy.expert_replicas, experts),
    }


def _shares(which: str, strategy: Strategy, replicas: int, stride: int) -> dict[str, Group]:
    """Of replicas that are ``stride`` apart: those that share one copy of the optimizer state, which are neighbours, and those
    that have the same part of it.
    """
    shards = strategy.shards(replicas)
    return {f"{which}share": Group(shards, stride), f"{which}shares": Group(replicas // shards, stride * shards)}


def blocked(sends: np.ndarray, chunks: int) -> np.ndarray:
    """What passes take longer where a stage waits for what it sends and receives, ``[2, places]``, from the seconds of a send
    between each two neighbours, ``[places - 1]``.

    Megatron-LM's schedules exchange in both directions at once. Behind a forward pass they send hidden states on and receive a
    gradient, behind a backward pass they send one back and receive the next hidden states. With several ``chunks`` both
    neighbours are served in one call behind a pass of each kind: each waits for half of it.
    """
    waits = np.zeros((2, len(sends) + 1))
    waits[0, :-1] = waits[1, 1:] = sends
    return waits if chunks == 1 else np.broadcast_to(waits.mean(axis=0), waits.shape)


class TimedWork:
    """The work of a step with the times that it takes on a device."""

    def __init__(self, work: StepWork, device: Device) -> None:
        self.work, self.strategy = work, work.workload.strategy
        self.device = device.of_ranks(self.strategy.device_num)
        self.groups = groups(self.strategy)
        parts: dict[Hashable, tuple[Pass, Pass]] = {}
        for name, part in work.parts.items():
            parts[name] = self.passes(part)
        stages = work.workload.plan.stages
        self.forward, self.backward = (
            tuple(
                self._copying(place, which, _added([(parts[name][which], count) for name, count in place.items()]))
                for place in work.places
            )
            for which in (0, 1)
        )
        places = work.places if work.workload.plan.v_shape else ()
        self.again = tuple(self._of_parts(self.again_seconds, place) for place in places)
        self.weight = tuple(
            self._of_parts(self.weight_gradients, place) + again
            for place, again in zip(places, self.again, strict=True)
        )
        self.send = self._send() if stages > 1 else 0.0
        self.ends = tuple(self._end(stage, update) for stage, update in enumerate(work.updates))

    def passes(self, part: Part) -> tuple[Pass, Pass]:
        """Forward and backward pass, of whose exchanges some run behind what other copies or parts of rows compute."""
        if part.row_parts == 1:
            forward, backward = self._both(part)
            return overlapped(forward, self.strategy.copies), overlapped(backward, self.strategy.copies)
        forward, backward = (
            _added([(overlapped(cut, part.row_parts), 1), (whole, 1)])
            for cut, whole in zip(self._both(part.of_rows(True)), self._both(part.of_rows(False)), strict=True)
        )
        return forward, backward

    def _both(self, part: Part) -> tuple[Pass, Pass]:
        again = self.spent(part.repeated, REPEATED)
        return self.spent(part.forward), _added([(self.gradients(part.backward), 1), (again, 1)])

    @property
    def durations(self) -> np.ndarray:
        """Of forward and backward passes, ``[2, places]``."""
        times = np.array([[one.seconds for one in passes] for passes in (self.forward, self.backward)])
        if self.device.software != "megatron":
            return times
        return times + blocked(np.full(times.shape[1] - 1, self.send), self.work.workload.plan.chunks)

    @property
    def pass_times(self) -> PassTimes:
        """What the schedule of the step follows from."""
        plan, (forward, backward) = self.work.workload.plan, self.durations.tolist()
        return PassTimes(
            plan.stages, plan.chunks, self.strategy.micro_batches, tuple(forward), tuple(backward), self.delay,
            self.strategy.schedule, self.weight, self.again, self.strategy.pieces,
        )  # fmt: skip

    @property
    def delay(self) -> float:
        """Of what goes to another stage, beside computation."""
        return 0.0 if self.device.software == "megatron" else self.send

    def spent(self, work: Work, label: str | None = None) -> Pass:
        """Operators one after the other; the host launches them, and may take longer than the device."""
        compute: dict[str, float] = {}
        exchanged: dict[str, float] = {}
        for one in work:
            if isinstance(one, Operator):
                name = label or one.kind
                compute[name] = compute.get(name, 0.0) + operator_seconds(one, self.device)
            elif seconds := self.exchange_seconds(one):
                exchanged[one.op] = exchanged.get(one.op, 0.0) + seconds
        waits = len(work) * self.device.efficiency.host.value - sum(compute.values()) - sum(exchanged.values())
        return Pass({**compute, HOST: waits} if waits > 0 else compute, exchanged)

    def gradients(self, work: Work) -> Pass:
        """A backward pass; the sum of an input's gradient may run behind the gradient of the weight that it met.

        Only products of columns have such a sum: behind those of rows nothing is added up (Shoeybi et al., 2019).
        """
        found, share = self.spent(work), self.device.gradient_overlap
        if share is None:
            return found
        summed = sum(
            self.exchange_seconds(one)
            for one in work
            if isinstance(one, Exchange) and one.op in SUMS and one.axis == "tp"
        )
        weights = sum(
            operator_seconds(one, self.device) for one in work if isinstance(one, Operator) and _of_columns(one)
        )
        return hiding(found, SUMS, share.value * min(summed, weights))

    def weight_gradients(self, part: Part) -> float:
        """Seconds of the products that give gradients of weights: those that MindSpore moves behind a backward pass."""
        return sum(
            operator_seconds(one, self.device)
            for one in part.backward
            if isinstance(one, Operator) and one.sizes and one.name.endswith(".weight")
        )

    def again_seconds(self, part: Part) -> float:
        """Seconds of what a backward pass computes again."""
        return self.spent(part.repeated).seconds

    def _of_parts(self, seconds: Callable[[Part], float], place: Mapping[Hashable, int]) -> float:
        """The seconds of all parts of a place."""
        return sum(count * seconds(self.work.parts[name]) for name, count in place.items())

    def _copying(self, place: Mapping[Hashable, int], backward: int, one: Pass) -> Pass:
        """A pass with what it waits for copies to the host or, backward, from there."""
        moving = {name: count for name, count in place.items() if self.work.parts[name].moved}
        if not moving:
            return one
        parts, rate = self.work.parts, self.device.host_rate
        waits = sum(count * moved_bytes(parts[name].moved) for name, count in moving.items()) / rate - one.seconds
        if backward:
            operators = sum(count * len(parts[name].backward) for name, count in place.items())
            each = one.seconds / operators
            late = sum(count * late_seconds(parts[name].moved, rate, each) for name, count in moving.items())
            waits = max(waits, late)
        return Pass(one.compute, {**one.exchanged, COPIES: waits}) if waits > 0 else one

    def exchange_seconds(self, one: Exchange) -> float:
        """Return the seconds of an exchange that nothing hides."""
        return exchange_seconds(one.op, one.bytes, self.groups[one.axis], self.device)

    def _send(self) -> float:
        """Seconds of hidden states on their way to the next stage; tensor-parallel ranks may share them."""
        shared = self.strategy.sequence_parallel or self.device.software == "megatron"
        size = self.work.sent.bytes / (self.strategy.model_parallel if shared else 1)
        return exchange_seconds("Send", size, self.groups["pp"], self.device)

    def _end(self, stage: int, update: StageUpdate) -> StageEnd:
        exchanged = sum(self.exchange_seconds(one) for one in update.exchanges if isinstance(one, Exchange))
        room = sum(one.seconds for one in self.backward[stage :: self.work.workload.plan.stages])
        room *= self.strategy.times_reduced
        hidden = min(exchanged * self.device.overlap.value, room)
        waits, behind = self._table() if stage == 0 else (0.0, 0.0)
        beside = sum(one.times * self.spent(one.work).seconds for one in update.beside)
        return StageEnd(
            exchanged - hidden + waits, hidden + behind, operator_seconds(update.update, self.device) + beside
        )

    def _table(self) -> tuple[float, float]:
        """Seconds of the embedding's way to the last stage and its gradient's way back: waited for, and hidden.

        The first micro-batch is on its way to the last stage meanwhile, and the last one on its way back.
        """
        if self.work.table is None:
            return 0.0, 0.0
        seconds = self.exchange_seconds(self.work.table)
        ways = [sum(one.seconds for one in passes[:-1]) for passes in (self.forward, self.backward)]
        waits = sum(max(0.0, seconds - way) for way in ways)
        return waits, 2 * seconds - waits


def overlapped(one: Pass, copies: int) -> Pass:
    """A pass of so many copies, of which one exchanges while others compute; those of the first one are waited for.

    MindSpore orders two copies and no more ("The micro interleaved num can only be 2", its front end says): of others nothing
    hides.
    """
    if copies != ORDERED:
        return one
    computed, exchanged = sum(one.compute.values()), sum(one.exchanged.values())
    return hiding(one, one.exchanged, min(computed, exchanged) * (copies - 1) / copies)


def hiding(one: Pass, kinds: Collection[str], seconds: float) -> Pass:
    """A pass of whose exchanges of some kinds ``seconds`` run behind computation."""
    if not seconds:
        return one
    left = 1 - seconds / sum(taken for op, taken in one.exchanged.items() if op in kinds)
    return Pass(one.compute, {op: taken * (left if op in kinds else 1) for op, taken in one.exchanged.items()})


def _of_columns(one: Operator) -> bool:
    """Whether it is the gradient of a weight that tensor parallelism splits by columns."""
    module = one.name.removesuffix(".weight").removesuffix(".matmul").rpartition(".")[2]
    return one.name.endswith(".weight") and module not in SPLIT_INPUT


def _added(passes: Sequence[tuple[Pass, int]]) -> Pass:
    """The sum of passes, each as often as it is said."""
    sums: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for one, times in passes:
        for total, part in zip(sums, (one.compute, one.exchanged), strict=True):
            for name, seconds in part.items():
                total[name] = total.get(name, 0.0) + seconds * times
    return Pass(*sums)
