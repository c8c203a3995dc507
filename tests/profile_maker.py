"""Profiles of a predicted step in the files of MindSpore's profiler, with planted slow-downs: what a device would have left.

Kernels are one row each, exchanges one entry each; the pipeline's simulator says how long a stage waits for others.
"""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mindllm.config import load_config
from mindllm.timing.costs.exchanges import legs
from mindllm.timing.costs.layer import FLASH_BACKWARD
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import ATTENTION, MATRIX, Operator
from mindllm.timing.pass_times import PassTimes
from mindllm.timing.step import TimedWork
from mindllm.timing.step_work import step_work

YAML = str(Path(__file__).parents[1] / "configs/llama2/pretrain_llama2_13b.yaml")
KEYS = [
    "--model.model_config.num_layers=4",
    "--parallel_config.data_parallel=2",
    "--parallel_config.model_parallel=2",
    "--parallel_config.pipeline_stage=2",
    "--parallel_config.micro_batch_num=4",
]
STEPS = 2  # the first one is left out
US, MS = 1e6, 1e3
KERNELS = (
    *("Step ID", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)"),
    *("Input Shapes", "Input Data Types", "Input Formats", "Output Shapes", "Output Data Types", "Output Formats"),
)
PARTS = (
    *("Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free", "Stage", "Bubble"),
    *("Communication(Not Overlapped and Exclude Receive)", "Preparing"),
)
DTYPES = {"bfloat16": "DT_BF16", "float16": "FLOAT16", "float32": "FLOAT"}


@dataclass(frozen=True)
class Plants:
    """What is not as predicted.

    Attributes:
        kernels: factor by the name of an operator (forward, backward and repeated).
        layers: those in which they are slow; empty: all.
        exchanges: factor by kind and axis.
        hidden: share of what replicas hide that is hidden.
        ranks: factor of all kernels by rank.
        host: seconds of gaps of a step, by stage; inside passes.
        begins: seconds before the first kernel.
        fetches: seconds of GetNext.
        unknown: seconds of kernels without shapes.
        jitter: spread of every kernel around what it takes, as a logarithm.
    """

    kernels: dict[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    exchanges: dict[tuple[str, str], float] = field(default_factory=dict)
    hidden: float = 1.0
    ranks: dict[int, float] = field(default_factory=dict)
    host: float = 0.0
    begins: float = 0.0
    fetches: float = 0.0
    unknown: float = 0.0
    jitter: float = 0.0


class Maker:
    """A step that is as predicted but for what is planted."""

    def __init__(self, step, plants=Plants()):
        self.step, self.plants, self.random = step, plants, np.random.default_rng(0)
        self.timed = TimedWork(step_work(step.workload), step.device)
        plan, strategy = step.workload.plan, step.workload.strategy
        self.stages, self.places = plan.stages, plan.stages * plan.chunks
        self.runs = strategy.micro_batches * strategy.accumulation
        self.stage_ranks = strategy.stage_device_num
        self.layers = self._layers_of_places()
        self.seconds = self._simulate()

    def _layers_of_places(self):
        """Numbers of the layers of each place."""
        found, start = [], 0
        for row in self.step.workload.plan.counts:
            for count in row:
                found.append(range(start, start + count))
                start += count
        return found

    def factor(self, one, layers=()):
        """The mean over some layers; of exchanges and what is in no layer, the one there is."""
        if isinstance(one, Operator):
            slow, chosen = self.plants.kernels.get(one.name.removesuffix(".weight"), 1.0), self.plants.layers
            share = sum(layer in chosen for layer in layers) / len(layers) if chosen and layers else 1.0
            return 1.0 + share * (slow - 1.0)
        return self.plants.exchanges.get((one.op, one.axis), 1.0)

    def work(self, place):
        """Operators and exchanges of one micro-batch on a place: which pass, name of the part, count, operator."""
        for name, count in self.timed.work.places[place].items():
            part = self.timed.work.parts[name]
            for which, each in ((0, part.forward), (1, (*part.backward, *part.repeated))):
                for one in each:
                    yield which, name, count, one

    def exchange(self, one):
        size = self.timed.groups[one.axis].size
        return self.timed.exchange_seconds(one) * self.factor(one) if size > 1 else 0.0

    def _simulate(self):
        """Passes of the slowest rank of every stage, which the others wait for; seconds of the step, and of waiting."""
        durations = np.zeros((2, self.places))
        self.slowest = [
            max(self.plants.ranks.get(rank, 1.0) for rank in self.ranks(stage)) for stage in range(self.stages)
        ]
        own = self.timed.durations
        for place in range(self.places):
            stage = place % self.stages
            for which, part, count, one in self.work(place):
                layers = () if isinstance(part, str) else self.layers[place]
                if isinstance(one, Operator):
                    durations[which, place] += (
                        count * operator_seconds(one, self.step.device) * self.factor(one, layers) * self.slowest[stage]
                    )
                else:
                    durations[which, place] += count * self.exchange(one)
        shares = own[:, :].reshape(2, -1, self.stages).sum((0, 1)) * self.runs
        for stage in range(self.stages):
            durations[:, stage :: self.stages] += own[:, stage :: self.stages] * self.plants.host / shares[stage]
        plan = self.step.workload.plan
        forward, backward = durations.tolist()
        line = PassTimes(
            plan.stages, plan.chunks, self.timed.pass_times.micro_batches, tuple(forward), tuple(backward),
            self.timed.pass_times.delay,
        ).simulated()  # fmt: skip
        self.busy = line.busy() * self.step.workload.strategy.accumulation
        ends = np.array([self.end(stage)[0] for stage in range(self.stages)])
        self.overhead = max(0.0, self.step.device.step_overhead.value)
        schedule = line.makespan * self.step.workload.strategy.accumulation
        once = self.plants.fetches + self.plants.unknown + max(self.plants.begins, self.overhead)
        seconds = schedule + ends.max() + once
        self.waits = seconds - self.busy - ends - once
        return seconds

    def end(self, stage):
        """Seconds after the last pass, what is exposed and what is hidden of replicas' exchanges, kernels."""
        update = self.timed.work.updates[stage]
        exchanged = sum(self.exchange(one) for one in update.exchanges)
        hidden = min(self.step.ends[stage].hidden * self.plants.hidden, exchanged)
        computed = operator_seconds(update.update, self.step.device) * self.slowest[stage]
        return exchanged - hidden + computed, exchanged - hidden, hidden

    def ranks(self, stage):
        return range(stage * self.stage_ranks, (stage + 1) * self.stage_ranks)

    def write(self, directory, ranks=None):
        for stage in range(self.stages):
            for rank in self.ranks(stage):
                if ranks is None or rank in ranks:
                    self.write_rank(directory / f"rank_{rank}" / "raw" / f"host_1_{rank}_ascend_ms", stage, rank)
        return directory

    def write_rank(self, top, stage, rank):
        place = top / "ASCEND_PROFILER_OUTPUT"
        place.mkdir(parents=True)
        (top / f"profiler_info_{rank}.json").write_text("{}")
        kernels, computing = self.kernels(stage, rank)
        exchanges, transit, late = self.exchanges(stage, rank, computing)
        _, _, hidden = self.end(stage)
        free = self.plants.host + max(self.plants.begins, self.overhead)
        bubble = self.waits[stage]
        row = {
            "Computing": computing, "Communication(Not Overlapped)": transit + late - hidden + bubble,
            "Overlapped": hidden, "Communication": transit + late + bubble, "Free": free, "Stage": self.seconds - bubble,
            "Bubble": bubble, "Communication(Not Overlapped and Exclude Receive)": transit + late - hidden,
            "Preparing": max(self.plants.begins, 0.01 * self.overhead),
        }  # fmt: skip
        with open(place / "step_trace_time.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(PARTS)
            for step in range(STEPS):
                warm = 1.7 if step == 0 else 1.0
                table.writerow([step, *(f"{US * warm * row[name]:.3f}" for name in PARTS[1:])])
        with open(place / "kernel_details.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(KERNELS)
            for step in range(STEPS):
                start = 1e9 * step
                norms = sum(row[1] == "RmsNorm" for row in kernels)
                for name, kind, core, seconds, inputs, outputs, dtype in kernels:
                    gap = self.plants.host / norms if kind == "RmsNorm" else 0.0
                    forms = ["ND"] * len(inputs)
                    cells = [";".join(",".join(map(str, shape)) for shape in each) for each in (inputs, outputs)]
                    types = [";".join([dtype] * len(each)) for each in (inputs, outputs)]
                    spent = US * seconds
                    times = f"{start:.3f}\t", f"{spent:.4f}", f"{US * gap:.6f}"
                    described = f'"{cells[0]}"', types[0], ";".join(forms), f'"{cells[1]}"', types[1], "ND"
                    table.writerow([step, name, kind, core, *times, *described])
                    start += spent
        tree = {f"step{step}": self.by_kind(exchanges, stage) for step in range(STEPS)}
        (place / "communication.json").write_text(json.dumps(tree))
        (place / "communication_matrix.json").write_text(json.dumps(self.matrix(exchanges)))

    def kernels(self, stage, rank):
        """Rows of a step and their sum."""
        factor, rows, numbers = self.plants.ranks.get(rank, 1.0), [], Counter()
        for place in range(stage, self.places, self.stages):
            for which, part, count, one in self.work(place):
                if not isinstance(one, Operator):
                    continue
                layers = [part] if isinstance(part, str) else list(self.layers[place])
                for run in range(round(count * self.runs)):
                    layer = layers[run % len(layers)]
                    rows.append(self.row(one, which, layer, numbers, factor))
        rows.append(self.row(self.timed.work.updates[stage].update, 1, "optimizer", numbers, factor))
        if self.plants.fetches:
            rows.append(("Default/GetNext-op0", "GetNext", "AI_CPU", self.plants.fetches, [], [(1,)], "INT32"))
        if self.plants.unknown:
            rows.append(("Default/Odd-op0", "OddKernel", "AI_CPU", self.plants.unknown, [], [], ""))
        return rows, sum(row[3] for row in rows)

    def row(self, one, which, layer, numbers, factor):
        numbers[one.kind] += 1
        scope = f"layers-CellList/{layer}-DecoderLayer" if isinstance(layer, int) else f"{layer}-Cell"
        cells = "/".join(f"{cell}-Cell" for cell in one.name.removesuffix(".weight").split(".")[:-1])
        factor *= np.exp(self.random.normal(0, self.plants.jitter))
        slow = self.factor(one, (layer,) if isinstance(layer, int) else ())
        seconds = operator_seconds(one, self.step.device) * slow * factor
        dtype = DTYPES[one.dtype]
        top = "Gradients" if which else "Default"
        name = f"{top}/network-CausalLM/model-Decoder/{scope}/{cells}/Op-op{numbers[one.kind]}"
        if one.kind == MATRIX:
            rows, inner, columns = map(round, one.sizes)
            batch = round(one.flops / (2 * rows * inner * columns))
            more = (batch,) if batch > 1 else ()
            return name, "MatMulV3" if batch == 1 else "BatchMatMulV2", "AI_CORE", seconds, \
                [(*more, rows, inner), (*more, inner, columns)], [(*more, rows, columns)], dtype  # fmt: skip
        if one.kind == ATTENTION:
            length = self.step.workload.seq_length
            times = FLASH_BACKWARD if which and one.flops > self.least_attention * 1.5 else 1.0
            heads = round(one.flops / times / (4 * length * (length / 2) * 128))
            shape = (1, heads, length, 128)
            kind = "FlashAttentionScoreGrad" if times > 1 else "FlashAttentionScore"
            return name, kind, "MIX_AIC", seconds, [shape] * 3, [shape], dtype
        size = max(1, round(one.bytes / 4))
        return (
            name,
            "RmsNorm" if "norm" in one.name else "Add",
            "AI_VECTOR_CORE",
            seconds,
            [(size,)],
            [(size,)],
            "DT_BF16",
        )

    @property
    def least_attention(self):
        return min(
            one.flops for place in range(self.places) for _, _, _, one in self.work(place)
            if isinstance(one, Operator) and one.kind == ATTENTION
        )  # fmt: skip

    def exchanges(self, stage, rank, computing):
        """Exchanges of a step, their sum without waiting, and the waiting: for the slowest rank of the stage."""
        found = defaultdict(list)
        for place in range(stage, self.places, self.stages):
            for _, _, count, one in self.work(place):
                if not isinstance(one, Operator) and self.exchange(one):
                    found[one.op, one.axis] += [(self.exchange(one), self.sent(one))] * round(count * self.runs)
        for one in self.timed.work.updates[stage].exchanges:
            if self.exchange(one):
                found[one.op, one.axis].append((self.exchange(one), self.sent(one)))
        transit = sum(seconds for each in found.values() for seconds, _ in each)
        kernels = computing - self.plants.fetches - self.plants.unknown
        late = kernels * (self.slowest[stage] / self.plants.ranks.get(rank, 1.0) - 1)
        rows = []
        for (op, axis), each in found.items():
            for number, (seconds, sent) in enumerate(each):
                share = late * seconds / transit
                rows.append(
                    (
                        f"hcom_{op[0].lower()}{op[1:]}__{axis_number(axis)}_{number}_1@group_{axis_number(axis)}",
                        seconds,
                        share,
                        sent,
                    )
                )
        return rows, transit, late if transit else 0.0

    def sent(self, one):
        return sum(leg.bytes for leg in legs(one.op, one.bytes, self.timed.groups[one.axis], self.step.device))

    def matrix(self, exchanges):
        """Links between ranks of a group, of which the second is slow."""
        found = {}
        for name in {each[0].split("__")[0] + "@" + each[0].split("@")[1] for each in exchanges}:
            kind, group = name.removeprefix("hcom_").lower().split("@")
            links = {"0-1": 20.0, "0-2": 5.0, "0-3": 20.0}
            entry = {
                link: {
                    "Transport Type": "HCCS",
                    "Transit Size(MB)": 1.0,
                    "Transit Time(ms)": 1.0,
                    "Bandwidth(GB/s)": rate,
                }
                for link, rate in links.items()
            }
            found |= {f"{kind}-{which}@{group}": entry for which in ("top1", "bottom1", "total")}
        return {f"step{step}": {"p2p": {}, "collective": found} for step in range(STEPS)}

    def by_kind(self, exchanges, stage):
        entry = {
            name: {
                "Communication Time Info": {
                    "Start Timestamp(us)": 1.0, "Elapse Time(ms)": MS * (seconds + late), "Transit Time(ms)": MS * seconds,
                    "Wait Time(ms)": MS * late, "Synchronization Time(ms)": 0.0, "Idle Time(ms)": 0.0,
                    "Wait Time Ratio": 0.0, "Synchronization Time Ratio": 0.0,
                },
                "Communication Bandwidth Info": {
                    "RDMA": {"Transit Size(MB)": 0, "Transit Time(ms)": 0},
                    "HCCS": {"Transit Size(MB)": sent / 1e6, "Transit Time(ms)": MS * seconds},
                    "SDMA": {"Transit Size(MB)": sent / 1e6, "Transit Time(ms)": MS * seconds},
                },
            }
            for name, seconds, late, sent in exchanges
        }  # fmt: skip
        total = {"Communication Time Info": {"Elapse Time(ms)": 1.0}, "Communication Bandwidth Info": {}}
        between = {}
        if self.stages > 1:
            each = MS * self.waits[stage] / self.runs
            for number in range(self.runs):
                between[f"hcom_receive__7_{number}_1@pp"] = {
                    "Communication Time Info": {"Elapse Time(ms)": each, "Wait Time(ms)": each},
                    "Communication Bandwidth Info": {},
                }
                between[f"hcom_send__7_{number}_1@pp"] = {
                    "Communication Time Info": {"Elapse Time(ms)": MS * self.timed.send, "Wait Time(ms)": 0.0},
                    "Communication Bandwidth Info": {},
                }
        return {"p2p": between, "collective": {**entry, "Total Op Info": total}}


def axis_number(axis):
    return {"tp": 11, "dp": 22, "cp": 33, "ep": 44, "etp": 55, "replica": 66, "all": 77}[axis]


def small_run():
    """A YAML, the keys that make it eight ranks in two stages, and the run."""
    return YAML, KEYS, load_config(YAML, KEYS)
