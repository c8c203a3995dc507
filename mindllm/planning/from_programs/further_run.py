"""Which run to simulate next, where those there are do not tell the costs of layers and stages apart."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

from mindllm.errors import UserError
from mindllm.planning.from_programs.stage_shapes import StageShape, place_of, undetermined
from mindllm.timing.stage_graph import ALL_RECOMPUTED, NONE, SELECT

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
        ", ".join(f"{key}: {value}" for key, value in written.items() if key) if kind != NONE else "nothing recomputed"
    )


def _shapes(counts: Sequence[int], layers: Sequence[str], kind: str) -> Run:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [
        StageShape(place_of(stage, len(counts)), tuple((name, kind) for name in layers[start : start + count]))
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
