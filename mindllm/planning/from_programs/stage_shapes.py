"""Which costs stages of simulated runs tell apart: the unknowns that each stage has, and whether all stages determine them.

Where the runs there are do not tell the costs of layers and stages apart, it says which run to simulate next.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindllm.config.reading.yaml_tree import inline_yaml
from mindllm.errors import UserError
from mindllm.parallel.stages import FIRST, LAST, MIDDLE
from mindllm.timing.stage_graph import ALL_RECOMPUTED, NONE, SELECT

Kind = tuple[str, str]  # name of the type of a layer, name of its recomputation
Factors = Mapping[Hashable, float]
OPEN = 1e-6  # share of an unknown in a direction that no row measures


@dataclass(frozen=True)
class StageShape:
    """A stage: its place in the pipeline (first, middle, last), its layers in order."""

    place: str
    layers: tuple[Kind, ...]

    @property
    def kinds(self) -> Mapping[Hashable, int]:
        """How many layers of each kind it holds."""
        return Counter(self.layers)

    @property
    def types(self) -> Mapping[Hashable, int]:
        """The same by type alone."""
        return Counter(name for name, _ in self.layers)


Design = Callable[[StageShape], Factors]


def by_type(stage: StageShape) -> Factors:
    """Layers by type, and the place."""
    return {**stage.types, stage.place: 1}


def by_type_and_end(stage: StageShape) -> Factors:
    """The same of what stages between the ends have none of beside their layers."""
    return dict(stage.types) if stage.place == MIDDLE else by_type(stage)


def by_kind(stage: StageShape) -> Factors:
    """Layers by type and recomputation, and the place."""
    return {**stage.kinds, stage.place: 1}


def by_repeated(stage: StageShape) -> Factors:
    """Layers that compute something again."""
    return {kind: stage.layers.count(kind) for kind in dict.fromkeys(stage.layers) if kind[1] != NONE}


def by_one_kind(stage: StageShape) -> Factors:
    """The place, and the kind of the layers where there is one; nothing of stages with several, and of the last one.

    The peak of the last stage is in the loss, whatever its layers are.
    """
    told = stage.place != LAST and len(stage.kinds) == 1
    return {**dict.fromkeys(stage.kinds, 1), stage.place: 1} if told else {}


def place_of(stage: int, stages: int) -> str:
    """The place of a stage."""
    return FIRST if stage == 0 else LAST if stage == stages - 1 else MIDDLE


def undetermined(stages: Sequence[StageShape]) -> list[Hashable]:
    """The unknowns, types, kinds and places, that these stages do not tell apart; empty where all are determined."""
    found: dict[Hashable, None] = {}
    for design in (by_type, by_type_and_end, by_kind, by_repeated):
        found |= dict.fromkeys(_open(stages, design))
    reference = _reference(stages)
    alone = [_without(by_one_kind(stage), reference) for stage in stages]
    found |= dict.fromkeys(_open_in(alone))
    met = {kind for stage in stages for kind in by_one_kind(stage)}
    return list(found | {kind: None for stage in stages for kind in stage.kinds if kind not in met})


def _reference(stages: Sequence[StageShape]) -> Hashable:
    """The kind whose working memory is counted with that of places."""
    return next((kind for stage in stages for kind in by_one_kind(stage) if isinstance(kind, tuple)), None)


def _without(factors: Factors, name: Hashable) -> Factors:
    return {key: value for key, value in factors.items() if key != name}


def _open(stages: Sequence[StageShape], design: Design) -> list[Hashable]:
    return _open_in([design(stage) for stage in stages])


def _open_in(rows: Sequence[Factors]) -> list[Hashable]:
    names, matrix = as_matrix(rows)
    if not names:
        return []
    _, sizes, directions = np.linalg.svd(matrix)
    rank = int((sizes > 1e-9 * sizes[0]).sum())
    free = np.abs(directions[rank:]).max(axis=0, initial=0.0) > OPEN
    return [name for name, is_open in zip(names, free, strict=True) if is_open]


def as_matrix(rows: Sequence[Factors]) -> tuple[list[Hashable], np.ndarray]:
    """The unknowns of rows and how often each row has each, ``[rows, unknowns]``; rows without any are left out."""
    kept = [row for row in rows if row]
    names = list(dict.fromkeys(name for row in kept for name in row))
    return names, np.array([[row.get(name, 0) for name in names] for row in kept], float).reshape(len(kept), len(names))


KEYS = {ALL_RECOMPUTED: "recompute", SELECT: "select_recompute", "comm": "select_comm_recompute"}
MOST = 3  # runs that are asked for at once
Run = Sequence[StageShape]


def too_few(runs: Sequence[Run], source: str) -> UserError | None:
    """The error that says what is not determined, and the run that would help; None where all is."""
    given = [stage for run in runs for stage in run]
    unclear = undetermined(given)
    if not unclear:
        return None
    names = ", ".join(dict.fromkeys(map(_name, unclear)))
    message = f"{source}: {len(given)} simulated stages do not tell the costs of {names} apart"
    candidates = list(_candidates(runs))
    for further in itertools.chain.from_iterable(
        itertools.combinations(candidates, count) for count in range(1, MOST + 1)
    ):
        if not undetermined([*given, *(stage for _, run in further for stage in run)]):
            return UserError(f"{message}; add a run with {'; and one with '.join(text for text, _ in further)}")
    return UserError(f"{message}; add a run with another number of layers of each type")


def _name(unknown: Hashable) -> str:
    return f"{unknown[0]} ({unknown[1]})" if isinstance(unknown, tuple) else f"{unknown}"


def _candidates(runs: Sequence[Run]) -> Iterator[tuple[str, Run]]:
    """Runs like the first one with other offsets and numbers of layers, all of one recomputation; as YAML, and as stages."""
    first = runs[0]
    own = [name for stage in first for name, _ in stage.layers]
    kinds = list(dict.fromkeys(kind for run in runs for stage in run for _, kind in stage.layers))
    for layers in _with_other_numbers(own):
        counts = [len(stage.layers) for stage in first]
        counts[-1] += len(layers) - len(own)
        average = len(layers) // len(first)
        for split in _splits(counts, layers):
            for kind in kinds:
                offset = [count - average for count in split]
                written = f"offset: {offset}, {_recomputation(kind, split)}"
                numbers = "".join(f"{layers.count(name)} of {name}, " for name in dict.fromkeys(own))
                yield f"{numbers if layers != own else ''}{written}", _shapes(split, layers, kind)


def _with_other_numbers(layers: Sequence[str]) -> Iterator[list[str]]:
    """These layers, and where there are several types, one more or one less of the first."""
    yield list(layers)
    if len(set(layers)) > 1:
        yield [layers[0], *layers]
        yield list(layers[1:])


def _splits(counts: Sequence[int], layers: Sequence[str]) -> Iterator[list[int]]:
    """These counts with a layer moved from one end to the other, or with one type of layers alone on the first stage."""
    for change in (0, 1, -1):
        moved = [counts[0] + change, *counts[1:-1], counts[-1] - change]
        if min(moved) > 0:
            yield moved
    alone = len(list(itertools.takewhile(lambda name: name == layers[0], layers)))
    rest = len(layers) - alone
    if rest >= len(counts) - 1:
        shared = [rest // (len(counts) - 1)] * (len(counts) - 1)
        yield [alone, *shared[:-1], rest - sum(shared[:-1])]


def _recomputation(kind: str, counts: Sequence[int]) -> str:
    written = {
        key: list(counts) if key == KEYS.get(kind) else False
        for key in dict.fromkeys((KEYS[ALL_RECOMPUTED], KEYS.get(kind)))
    }
    return (
        ", ".join(f"{key}: {inline_yaml(value)}" for key, value in written.items() if key)
        if kind != NONE
        else "nothing recomputed"
    )


def _shapes(counts: Sequence[int], layers: Sequence[str], kind: str) -> Run:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [
        StageShape(place_of(stage, len(counts)), tuple((name, kind) for name in layers[start : start + count]))
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
