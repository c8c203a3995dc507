"""Reads the files MindSpore's memory tracker leaves in ``rank_R/`` (``MS_ALLOC_CONF=memory_tracker:True``)."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mindllm.compiled.simulation.simulation import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Block,
    Collective,
    Task,
    operator_of,
)

SOMAS = "SomasMemory"  # the name of its blocks
PLAN = "*_somas_tensor_offset_*.ir"
TENSOR = re.compile(r"%(\d+)T\t#(\d+)S\t#\d+S\t&(\d+)\t\w+\t\w+\t(\d+)\t(\d+)\t(\S+)")
NODE = re.compile(r"\$\d+\t(\S+)\t\d+\tinputs\[([^\]]*)\]")
INPUT = re.compile(r"%(\d+)T")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor with its place. ``size`` and ``offset`` are bytes; it lives from operator ``start`` to ``end`` of the graph, both
    included. ``node`` writes it, ``users`` read it.
    """

    size: int
    offset: int
    start: int
    end: int
    node: str
    users: tuple[str, ...]


def read_plans(directory: Path) -> list[list[PlannedTensor]]:
    """Read the plan of every graph with planned memory, from the files of the memory tracker in ``rank_R/``."""
    return [list(_tensors(path)) for path in sorted(directory.glob(PLAN))]


def fullest_moment(plan: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """Return the tensors in use when most of the planned memory is in use.

    Of those that share a place, as an operator's that writes into its input, only the largest.
    """
    tensors = list(plan)
    times = sorted({tensor.start for tensor in tensors})
    moments = (_places(tensor for tensor in tensors if tensor.start <= time <= tensor.end) for time in times)
    return max(moments, key=lambda moment: sum(tensor.size for tensor in moment), default=[])


def _places(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    largest: dict[int, PlannedTensor] = {}
    for tensor in tensors:
        if tensor.offset not in largest or largest[tensor.offset].size < tensor.size:
            largest[tensor.offset] = tensor
    return list(largest.values())


def _tensors(path: Path) -> Iterator[PlannedTensor]:
    lines = path.read_text(encoding="utf-8").splitlines()
    users = defaultdict[str, list[str]](list)
    for line in lines:
        if node := NODE.match(line):
            for number in INPUT.findall(node[2]):
                users[number].append(node[1])
    for line in lines:
        if found := TENSOR.match(line):
            number, size, offset, start, end, name = found.groups()
            yield PlannedTensor(int(size), int(offset), int(start), int(end), name, tuple(users[number]))


BLOCKS, EXECUTED = "memory_block.csv", "execute_order.csv"
FOR_EVER = 2**63 - 1
ON_THE_HOST = "Other"  # the pool of what ``swap_config`` moves: its sums and addresses are its own
PLANNED = "Somas"
MOMENTS = (  # what optimizers of MindSpore and MindFormers put before the name of a weight
    "adam_m.", "adam_v.", "moment1.", "moment2.", "vhat.", "moments.", "accum.", "stat.",
    "exp_avg.", "exp_avg_sq.", "max_exp_avg_sq.", "muon_m.",
    "adam_m_codes.", "adam_v_codes.", "adam_m_scales.", "adam_v_scales.", "master.",
)  # fmt: skip
OPTIMIZER_PREFIXES = (*MOMENTS, "beta1_power", "beta2_power")
ACCUMULATOR_PREFIXES = ("accu_grads.", "accumulated.")  # of devices that share the model, and of one alone
TABLES = ("rotary_cos", "rotary_sin", "attention_mask")
UPDATE = re.compile(
    r"/(update-ApplyGradients|optimizer-\w+|clip_grad_norm-\w+)/"
)  # scopes of the clipping and the optimizer
EXCHANGES = frozenset(
    {"AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AlltoAllV", "AllToAll", "Broadcast", "Send", "Receive"}
)


@dataclass(frozen=True)
class Tracked:
    """The contents of the files, and the peaks in bytes: of the blocks, and with gaps between them.

    ``planned``: the tensors that fill blocks of a planned memory at its fullest moment; their times count its graph's operators.
    """

    blocks: tuple[Block, ...]
    tasks: tuple[Task, ...]
    collectives: tuple[Collective, ...]
    used_peak: int
    actual_peak: int
    planned: tuple[Block, ...] = ()


def read_tracked(directory: Path, rename: Callable[[str], str] = str, order: Path | None = None) -> Tracked:
    """Read ``memory_block.csv``, ``task.csv`` and ``execute_order/*.csv`` below ``rank_R/``.

    ``rename`` is applied to the names of operators and parameters; ``order`` is the directory of the latter files, which
    MindSpore puts beside graphs where it saves these.
    """
    ordered_in, rename = order or directory / "execute_order", cache(rename)
    order_rows = _rows(ordered_in / EXECUTED)
    executed = [row | {"node_name": rename(row["node_name"])} for row in order_rows]
    streams = {row["node_name"]: int(row["stream_id"]) for row in executed}
    tasks = tuple(
        Task(int(row["time_stamp"]), name, streams.get(name, 0))
        for row in _rows(directory / "task.csv")
        for name in [rename(row["node_name"])]
    )
    nodes = {task.time: task.node for task in tasks}
    rows = [
        row | {"node_name": rename(row["node_name"])}
        for row in _rows(directory / BLOCKS)
        if row.get("pool_type") != ON_THE_HOST
    ]
    return Tracked(
        blocks=tuple(_block(row, nodes) for row in rows),
        tasks=tasks,
        collectives=tuple(_collectives(ordered_in, [row["node_name"] for row in executed])),
        used_peak=max(int(row["actual_used_memory"]) for row in rows),
        actual_peak=max(int(row["actual_peak_memory"]) for row in rows),
        planned=tuple(_planned(directory, rename)),
    )


def _planned(directory: Path, rename: Callable[[str], str]) -> Iterator[Block]:
    for plan in read_plans(directory):
        for tensor in fullest_moment(plan):
            node, users = rename(tensor.node), [rename(user) for user in tensor.users]
            kind = category(PLANNED, node, users)
            yield Block(tensor.start, tensor.end + 1, tensor.offset, 0, tensor.size, PLANNED, node, (), kind)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows by column name. ``csv.DictReader`` takes twice as long, for rows of other lengths."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = filter(None, csv.reader(file))
        names = next(rows, [])
        yield from (dict(zip(names, row, strict=True)) for row in rows)


def _block(row: Mapping[str, str], nodes: Mapping[int, str]) -> Block:
    users = tuple(map(int, re.findall(r"\d+", row["user_tasks"])))
    end = int(row["end_time_stamp"])
    return Block(
        start=int(row["start_time_stamp"]),
        end=None if end == FOR_EVER else end,
        address=int(row["device_addr"], 16),
        stream=int(row["stream_id"]),
        size=int(row["size"]),
        kind=row["type"],
        node=row["node_name"],
        users=users,
        category=category(row["type"], row["node_name"], [nodes[user] for user in users if user in nodes]),
    )


def category(kind: str, node: str, users: list[str]) -> str:
    """Return the purpose of a block, from its writer and its readers.

    A parameter is known by its name. Of the rest, outputs of exchanges are communication buffers; what the backward pass hands
    to the optimizer, or to an exchange or accumulator outside of it, is a gradient; what the optimizer computes counts as its
    state, and so does what only the optimizer reads, for operators of functions that it maps have no scope.
    """
    if kind == "Weight":
        return _category_of_parameter(node)
    if not operator_of(node):
        return OTHER
    if operator_of(node) in EXCHANGES:
        return COMMUNICATION
    if UPDATE.search(node):
        return OPTIMIZER
    if node.startswith(BACKWARD) and users and all(UPDATE.search(user) or _accumulates(user) for user in users):
        return GRADIENTS
    if users and all(UPDATE.search(user) for user in users):
        return OPTIMIZER
    return ACTIVATIONS


def _accumulates(node: str) -> bool:
    return operator_of(node) == "AssignAdd"


def _category_of_parameter(name: str) -> str:
    if name.startswith(OPTIMIZER_PREFIXES):
        return OPTIMIZER
    if name.startswith(ACCUMULATOR_PREFIXES):
        return GRADIENTS
    return OTHER if name.endswith(TABLES) else WEIGHTS


def _collectives(directory: Path, nodes: list[str]) -> Iterator[Collective]:
    """``nodes``: all operators in order of execution, which the index of a row counts from 1."""
    path = directory / "comm_execute_order.csv"
    for row in _rows(path) if path.is_file() else ():  # a single device exchanges nothing
        position = int(row["index"])
        peers = [row[name] for name in ("dest_rank", "src_rank") if row[name]]
        yield Collective(
            position=position,
            node=nodes[position - 1],
            operator=row["primitive"],
            group=row["group"],
            ranks=tuple(map(int, row["comm_rank"].split())),
            peer=int(peers[0]) if peers else None,
            shape=row["input_shape"],
            dtype=row["input_type"],
            sent=int(row["input_size"] or 0),
            received=int(row["output_size"] or 0),
        )
