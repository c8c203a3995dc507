"""Predict the throughput of 1F1B and interleaved 1F1B from the passes that Qi et al. measured (2024, table 6).

The passes are means over stages. First and last stage hold a layer less and the embedding or the head instead; how long those
take relative to a layer is the operator model's. Every pass also waits for the exchanges of its stage, which go in both
directions at the same time, and take longer between nodes of eight devices, by the described links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mindllm.schedules.orders import stage_orders, timetable
from mindllm.schedules.simulate import simulate
from mindllm.terminal.console import track
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import Operator
from mindllm.timing.device import Device, read_device
from mindllm.timing.measured.calibrate import uncalibrated
from mindllm.timing.step import blocked
from mindllm.timing.step_work import Part, step_work
from mindllm.timing.workload import Strategy, Workload
from toolkit.benchmark.published_steps import MEGATRON, even_plan, gpt

SEQUENCE = 1024
NODE = 8  # devices of a node
VOCABULARY = 32_000  # the table does not say: that of a SentencePiece model of the usual size
SCHEDULES = {"1F1B": "1F1B", "1F1BI": "interleaved"}


def zero_bubble_rows(
    rows: Sequence[Mapping[str, str]],
) -> tuple[str, Sequence[str], list[tuple[str, ...]]]:
    """A table with a line for each row: measured and predicted samples a second and device."""
    device, lines, found = uncalibrated(read_device("a100_80g")), list[tuple[str, ...]](), list[float]()
    for row in track(rows, "simulating schedules"):
        cells = []
        for name, predicted in throughputs(row, device):
            if not row[f"thr_{name}"]:
                cells.append(f"not measured / {predicted:.3g}")
                continue
            error = predicted / float(row[f"thr_{name}"]) - 1
            found.append(error)
            cells.append(f"{float(row[f'thr_{name}']):g} / {predicted:.3g} ({100 * error:+.1f}%)")
        lines.append((f"{row['model']}, {row['p']} stages, {row['m']} micro-batches", *cells))
    sizes = 100 * np.abs(found)
    columns = ("samples/s/device, measured / predicted", *SCHEDULES.values())
    total = f"{sizes.mean():.2f} / {np.median(sizes):.2f} / {sizes.max():.2f}%"
    lines.append(("mean / median / worst of all", total, ""))
    return "Qi et al., throughput from measured passes", columns, lines


def throughputs(row: Mapping[str, str], device: Device) -> Iterator[tuple[str, float]]:
    """Samples a second and device under each schedule."""
    stages, micro, size, layers = (int(row[key]) for key in ("p", "m", "mbs", "layers"))
    forward, backward, weight = (float(row[key]) for key in ("TF", "TB", "TW"))
    depth = (layers + 2) // stages
    shares = place_shares(row, device, depth, stages)
    samples = 1e3 * micro * size / stages  # times are milliseconds
    for name, chunks in (("1F1B", 1), ("1F1BI", depth)):
        own = shares.reshape(depth, stages).sum(axis=0) if chunks == 1 else shares
        passes = np.array([forward * own, (backward + weight) * own]) + blocked(sends(row, device, len(own)), chunks)
        table = timetable(stage_orders("1f1b", stages, chunks, micro), chunks)
        yield name, samples / simulate(table, passes[0], passes[1]).makespan


def sends(row: Mapping[str, str], device: Device, places: int) -> np.ndarray:
    """Milliseconds of a send from each place to the next, ``[places - 1]``.

    The measured mean over neighbours, of which those of two nodes take longer, as their link has it.
    """
    stages, sent = int(row["p"]), 2.0 * int(row["mbs"]) * SEQUENCE * int(row["hidden"])
    inside, outside = (exchange_seconds("Send", sent, group, device) for group in (Group(2), Group(2, NODE)))
    between = np.full(stages, inside)
    between[NODE - 1 :: NODE] = (
        outside if stages > NODE else inside
    )  # the last one leads on to the first stage's next chunk
    between *= float(row["Tcomm"]) / between[:-1].mean()
    return np.resize(between, places - 1)


def place_shares(row: Mapping[str, str], device: Device, depth: int, stages: int) -> np.ndarray:
    """Time of every place (chunk x stages + stage) of a layer each, relative to the mean of all stages: ``[places]``."""
    architecture = gpt(int(row["hidden"]), int(row["heads"]), 2, VOCABULARY, SEQUENCE)
    strategy = Strategy(pipeline_stage=2, micro_batch_size=int(row["mbs"]))
    parts = step_work(Workload(architecture, SEQUENCE, strategy, even_plan(2, 2, 1, full=False), MEGATRON)).parts
    embedding, head = (_seconds(parts[name], device) for name in ("embedding", "head"))
    layer = next(_seconds(part, device) for name, part in parts.items() if name not in ("embedding", "head"))
    shares = np.ones(depth * stages)
    shares[0], shares[-1] = embedding / layer, head / layer
    return shares / (shares.sum() / stages)


def _seconds(part: Part, device: Device) -> float:
    work = (*part.forward, *part.backward)
    return sum(operator_seconds(one, device) for one in work if isinstance(one, Operator))
