"""A simulation as moments: for every kind of operator the fullest moment at which one allocates memory, and what fills it then.

The peak is the fullest of all moments. In a stage with more layers, or more micro-batches alive, it may be another one; so
moments are compared across simulations by kind, and never the peaks themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mindllm.compiled.simulation.memory_tracker import SOMAS
from mindllm.compiled.simulation.simulation import (
    ACTIVATIONS,
    CATEGORIES,
    OTHER,
    Block,
    Simulation,
    operator_of,
    path_of,
)
from mindllm.reduced_runs.stage import LAYER_NUMBER

LAYERS = "*"  # stands for their number in a path
OF_OPERATOR = re.compile(r"-op\d+$")  # which each of its copies in layers and micro-batches has another of
NUMBER = re.compile(r"(-op\d+|-\d+)$")
WRAPPERS = re.compile(r"^(network\.)+")
INPUT = re.compile(r"inputs\d+")
GIVEN = "inputs and parameters"  # the moment at which the last of them is allocated
GRADIENT_LEVEL = re.compile(r"\.Grad_\w+")


@dataclass(frozen=True)
class Use:
    """What a piece of memory is there for: category, the cell or parameter without the number of its layer, operator.

    ``operator`` is empty for parameters; ``backward`` says whether it is one of the backward pass.
    """

    category: str
    path: str
    operator: str
    backward: bool

    @cached_property
    def is_input(self) -> bool:
        """Whether it is a tensor the step is given. The runtime brings it when it gets to it, and frees it when it likes."""
        return not self.operator and INPUT.fullmatch(self.path) is not None

    @property
    def is_planned(self) -> bool:
        """Whether it is a block of a memory that MindSpore plans as a whole."""
        return self.path == SOMAS

    @property
    def is_outside_layers(self) -> bool:
        """Whether it is an activation of the embedding, the head or the loss. Operators without a cell may be of any."""
        return self.category == ACTIVATIONS and self.path != "" and LAYERS not in self.path


OF_OTHER_MOMENTS = Use(OTHER, f"{SOMAS}: of other moments", "", False)
Fill = Mapping[Use, int]
"""Bytes of every use at one moment."""
Moments = Mapping[str, Fill]
"""The fullest moment of each kind of operator, by its name without numbers."""


def bytes_of(fill: Fill) -> int:
    """All that is in use."""
    return sum(fill.values())


def own_bytes_of(fill: Fill) -> int:
    """The same without inputs of the step: what an operator's place in the step decides."""
    return sum(size for use, size in fill.items() if not use.is_input)


def by_category(fill: Fill) -> Mapping[str, int]:
    """Bytes of every category; they add up to :func:`bytes_of`."""
    sums = Counter(dict.fromkeys(CATEGORIES, 0))
    for use, size in fill.items():
        sums[use.category] += size
    return sums


def with_planned(fill: Fill, planned: Fill) -> Fill:
    """``fill`` with what lies in its blocks of planned memory in place of them; all of it is as many bytes as before.

    Their fullest moment need not be that of the graph at which other memory is at its peak: nobody tells when that is. What is
    left of the blocks is for other moments, and the gaps between tensors.
    """
    size, tensors = planned_bytes_of(fill), bytes_of(planned)
    if not size or not tensors:
        return fill
    share = min(1.0, size / tensors)
    parts = Counter({use: int(part * share) for use, part in planned.items()})
    rest = Counter({use: part for use, part in fill.items() if not use.is_planned})
    rest[OF_OTHER_MOMENTS] += size - bytes_of(parts)
    return {use: part for use, part in (rest + parts).items() if part}


def planned_bytes_of(fill: Fill) -> int:
    """All blocks of planned memory."""
    return sum(size for use, size in fill.items() if use.is_planned)


def fullest(moments: Moments) -> Fill:
    """What is in use at the peak."""
    return max(moments.values(), key=bytes_of)


def use_of(block: Block) -> Use:
    """What a block is there for."""
    return Use(block.category, *place_of(block.node), block.backward)


def place_of(node: str) -> tuple[str, str]:
    """Path and operator of a node by its full name, without the number of the layer; of a gradient those of the forward cell."""
    return _place_of(OF_OPERATOR.sub("-op0", node))


@lru_cache(1 << 16)
def _place_of(node: str) -> tuple[str, str]:
    path = GRADIENT_LEVEL.sub("", WRAPPERS.sub("", path_of(node)))
    return LAYER_NUMBER.sub(LAYERS, NUMBER.sub("", path)), operator_of(node)


def moments_of(simulation: Simulation) -> Moments:
    """The fullest moment of each kind of operator. The fullest of all holds ``simulation.used_peak`` bytes.

    Inputs and parameters are allocated when the runtime gets to them, which is no moment of its own, unless it is the peak. Then
    its name does not tell which of them came last: that is chance. Where operators share one block (``memory_optimize_level:
    O1``), it is all there is.
    """
    blocks = sorted(simulation.blocks, key=lambda block: block.start)
    in_use = list(_used(blocks))
    peak = max(in_use)
    best: dict[str, tuple[int, int]] = {}
    for index, used in enumerate(in_use):
        node = blocks[index].node
        kind = LAYER_NUMBER.sub(LAYERS, NUMBER.sub("", node)) if operator_of(node) else GIVEN
        if (kind != GIVEN or used == peak) and used > best.get(kind, (-1, 0))[0]:
            best[kind] = (used, index)
    wanted = {index for _, index in best.values()}
    fills = {index: fill for index, fill in enumerate(_fills(blocks, wanted)) if fill is not None}
    return {kind: fills[index] for kind, (_, index) in best.items()}


def _used(blocks: Sequence[Block]) -> Iterator[int]:
    """Bytes in use when each block has just been allocated."""
    used = 0
    for block, freed in _with_freed(blocks):
        used += block.size - sum(other.size for other in freed)
        yield used


def _fills(blocks: Sequence[Block], wanted: set[int]) -> Iterator[Fill | None]:
    """The same by use, at the allocations that are wanted."""
    sums: Counter[Use] = Counter()
    for index, (block, freed) in enumerate(_with_freed(blocks)):
        for other in freed:
            sums[use_of(other)] -= other.size
        sums[use_of(block)] += block.size
        yield {use: size for use, size in sums.items() if size} if index in wanted else None


def _with_freed(blocks: Sequence[Block]) -> Iterator[tuple[Block, list[Block]]]:
    """Each block, in order of allocation, with those freed since the one before it."""
    ending = sorted((block for block in blocks if block.end is not None), key=lambda block: block.end or 0)
    gone = 0
    for block in blocks:
        first = gone
        while gone < len(ending) and (ending[gone].end or 0) <= block.start:
            gone += 1
        yield block, ending[first:gone]
