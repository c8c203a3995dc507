"""What the dry run keeps of a simulation: its moments, its memory over time, its largest blocks; small enough to cache."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mindllm.compiled.simulation.simulation import Block, Simulation
from mindllm.dry_run.moments import Fill, Moments, Use, fullest, moments_of, use_of, with_planned
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.outside import read_compressed_json

FORMAT = "mindllm dry run profile 2"
POINTS_OF_TIME = 1500
LARGEST = 60
PLAIN = ("rank", "used_peak", "actual_peak", "peak_time")  # fields that JSON holds as they are


@dataclass(frozen=True)
class Alive:
    """A block in use at the peak: the operator or parameter whose it is, its life, where in the source it comes from."""

    node: str
    use: Use
    size: int
    start: int
    end: int | None


@dataclass(frozen=True)
class Profile:
    """One simulated rank. Sizes are bytes, times are counts of events.

    ``timeline`` holds (time, bytes in use), thinned out; ``largest`` the largest blocks in use at the peak.
    ``planned``: contents of the blocks of planned memory at its fullest moment.
    """

    rank: int
    used_peak: int
    actual_peak: int
    moments: Moments
    timeline: tuple[tuple[int, int], ...]
    peak_time: int
    largest: tuple[Alive, ...]
    messages: tuple[str, ...]
    planned: Fill = field(default_factory=dict)

    @property
    def peak(self) -> Fill:
        """What fills the memory at the peak."""
        return with_planned(fullest(self.moments), self.planned)

    @property
    def gaps(self) -> int:
        """Bytes between blocks: what the peak with fragments has more."""
        return self.actual_peak - self.used_peak


def profile_of(simulation: Simulation) -> Profile:
    """Boils a simulation down."""
    alive = simulation.alive(simulation.peak_time)
    return Profile(
        rank=simulation.rank,
        used_peak=simulation.used_peak,
        actual_peak=simulation.actual_peak,
        moments=moments_of(simulation),
        timeline=tuple(thinned(simulation.memory_over_time(), POINTS_OF_TIME)),
        peak_time=simulation.peak_time,
        largest=tuple(Alive(b.node, use_of(b), b.size, b.start, b.end) for b in alive[:LARGEST]),
        messages=simulation.messages,
        planned=_sums(simulation.planned),
    )


def _sums(blocks: Iterable[Block]) -> Fill:
    sums: Counter[Use] = Counter()
    for block in blocks:
        sums[use_of(block)] += block.size
    return dict(sums)


def thinned(points: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """At most ``2 * count`` of the points: the lowest and the highest of each of ``count`` equal pieces."""
    if len(points) <= 2 * count:
        return points
    size = -(-len(points) // count)
    pieces = (points[start : start + size] for start in range(0, len(points), size))
    return [
        point for piece in pieces for point in sorted({min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])})
    ]


def save_profile(profile: Profile, path: Path) -> None:
    """Writes it as compressed JSON; every use once."""
    uses: dict[Use, int] = {}

    def number(use: Use) -> int:
        return uses.setdefault(use, len(uses))

    tree = {
        "format": FORMAT,
        **{name: getattr(profile, name) for name in PLAIN},
        "messages": profile.messages,
        "timeline": profile.timeline,
        "moments": {kind: {number(use): size for use, size in fill.items()} for kind, fill in profile.moments.items()},
        "planned": {number(use): size for use, size in profile.planned.items()},
        "largest": [{**asdict(alive), "use": number(alive.use)} for alive in profile.largest],
    }
    tree["uses"] = [list(asdict(use).values()) for use in uses]
    with atomic_open(path, "wb") as file, gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as text:
        json.dump(tree, text, separators=(",", ":"))


def load_profile(path: Path) -> Profile:
    """Reads what :func:`save_profile` wrote; a UserError says that the file is something else."""
    try:
        tree = read_compressed_json(path)
        if tree["format"] != FORMAT:
            raise ValueError(f"its format is {tree['format']}")
        uses = [Use(*fields) for fields in tree["uses"]]
        largest = (Alive(**alive) for alive in tree["largest"])
        return Profile(
            **{name: tree[name] for name in PLAIN},
            moments={k: {uses[int(n)]: size for n, size in fill.items()} for k, fill in tree["moments"].items()},
            timeline=tuple((time, used) for time, used in tree["timeline"]),
            largest=tuple(replace(alive, use=uses[int(alive.use)]) for alive in largest),  # type: ignore[call-overload]
            messages=tuple(tree["messages"]),
            planned={uses[int(n)]: size for n, size in tree["planned"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise UserError(f"{path} is no profile of a dry run ({FORMAT}): {error}") from None
