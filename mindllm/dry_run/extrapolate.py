"""The memory of a large stage from simulations of small ones.

With the operators of a layer fixed, the bytes at a moment of one kind are

    a + b·layers + alive·(c + d·layers) + e·micro-batches,

``layers`` for each run of equal layers: weights, optimizer state and gradients grow with layers, kept activations with
layers and micro-batches alive, the bookkeeping of a step with its micro-batches. Small simulations give the coefficients
moment by moment; the peak is the fullest extrapolated moment. A further, larger simulation checks it.

Inputs of the step, which the runtime brings when it gets to them, count as there if a simulation has them at that moment, and are
not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindllm.compiled.simulation.simulation import ACTIVATIONS, COMMUNICATION
from mindllm.dry_run.moments import Fill, Moments, Use
from mindllm.reduced_runs.stage import Point

FEWEST_LAYERS = 2  # of a stage: its first layer and its last one
FEWEST_ALIVE = 2
OF_OPERATORS = (ACTIVATIONS, COMMUNICATION)  # categories of what operators result in


@dataclass(frozen=True)
class Design:
    """The simulations that give the memory of stages which are alike.

    Attributes:
        base: the smallest one.
        varied: runs whose layers differ between simulations; all others have their real number.
        alive: whether the number of micro-batches alive is varied, too.
        passing: two simulations of which the second has some more micro-batches, if the stages have more than the base: what
            those cost beside what is alive.
        check: a larger one that none of the coefficients comes from; None where only micro-batches are fewer.
        deepening: by how many micro-batches alive simulations differ.
        together: varied runs always have the same number of layers: those of chunks, which take turns in being alive.
    """

    base: Point
    varied: tuple[int, ...]
    alive: bool
    passing: tuple[Point, Point] | None
    check: Point | None
    together: bool = False
    deepening: int = 1

    @property
    def growths(self) -> tuple[tuple[int, ...], ...]:
        """Runs that grow at the same time."""
        return (self.varied,) if self.together else tuple((run,) for run in self.varied)

    def longer(self, point: Point, runs: Collection[int]) -> Point:
        """``point`` with one more layer in some runs."""
        layers = [count + (index in runs) for index, count in enumerate(point.layers)]
        return replace(point, layers=tuple(layers))

    @property
    def deeper(self) -> Point:
        """The base with more micro-batches alive."""
        return replace(self.base, alive=self.base.alive + self.deepening)

    @property
    def corners(self) -> list[Point]:
        """The simulations whose differences are the coefficients."""
        starts = [self.base, self.deeper] if self.alive else [self.base]
        return [corner for start in starts for corner in (start, *(self.longer(start, runs) for runs in self.growths))]

    @property
    def points(self) -> list[Point]:
        """All simulations."""
        return list(dict.fromkeys([*self.corners, *(self.passing or ()), *filter(None, [self.check])]))

    def predict(self, target: Point, moments: Mapping[Point, Moments], growing: bool = True) -> Moments:
        """The moments of a stage at ``target``, from those of the corners; kinds they do not all have are left out.

        ``growing``: what some corners do not have grows from nothing; otherwise its being there is chance (the results of
        an operator that others were quicker than), and it counts as in the corner with most.
        """
        weights = self._weights(target)
        kinds = set.intersection(*(set(moments[point]) for point in weights))
        steps = self._more_micro_batches(target)
        passing, usual = _without_chance(self._passing(moments))
        found = {}
        for kind in sorted(kinds):  # of equal peaks the first is told
            fill = {point: moments[point][kind] for point in self._like_base if kind in moments[point]}
            parts = [(factor, moments[point][kind]) for point, factor in weights.items()]
            found[kind] = (
                _combined([*parts, (steps, passing.get(kind, usual))])
                | ({} if growing else _now_and_then(fill))
                | _inputs(target, fill)
            )
        return found

    @property
    def _like_base(self) -> list[Point]:
        """Simulations that are small in the same way: corners, and the base with more micro-batches."""
        return [*self.corners, *(point for point in self.passing or () if point.layers == self.base.layers)]

    def _weights(self, target: Point) -> dict[Point, int]:
        """The factor of each corner in the sum that is linear in layers, and in layers times micro-batches alive."""
        weights = dict.fromkeys(self.corners, 0)
        deeper = (target.alive - self.base.alive) // self.deepening
        for start, share in ((self.base, 1 - deeper), (self.deeper, deeper)):
            if start not in weights:
                continue
            weights[start] += share
            for runs in self.growths:
                longer = target.layers[runs[0]] - self.base.layers[runs[0]]
                weights[self.longer(start, runs)] += share * longer
                weights[start] -= share * longer
        return weights

    def _more_micro_batches(self, target: Point) -> int:
        """By how many differences of :attr:`passing` a target has more micro-batches than the base."""
        if not self.passing:
            return 0
        fewer, more = self.passing
        return (target.micro_batches - self.base.micro_batches) // (more.micro_batches - fewer.micro_batches)

    def _passing(self, moments: Mapping[Point, Moments]) -> Moments:
        """What more micro-batches add to each kind of moment that both simulations of them have."""
        if not self.passing:
            return {}
        fewer, more = (moments[point] for point in self.passing)
        return {kind: _combined([(1, more[kind]), (-1, fewer[kind])]) for kind in sorted(set(fewer) & set(more))}


def design_for(
    targets: Sequence[Point],
    micro_step: int = 1,
    shorter: bool = True,
    together: bool = False,
    deepening: int = 1,
    length: Callable[[int], int] = int,
    alone: bool = False,
) -> Design | None:
    """Returns the simulations for stages at ``targets``; None where simulating the stages themselves costs no more.

    Args:
        targets: where the stages are; they differ in layers and micro-batches alive.
        micro_step: micro-batches come in multiples of this.
        shorter: whether the pipeline, and with it the number of micro-batches alive, can be made smaller.
        together: whether runs belong to chunks, and can only grow with one another.
        deepening: by how many stages, and micro-batches alive, pipelines can grow.
        length: stages of the pipeline that keeps so many micro-batches alive; MindSpore wants no fewer micro-batches.
        alone: whether one layer of a run is like several, as long as other runs have the stage's first or last one.
    """
    runs = range(len(targets[0].layers))
    fewest = max(1, FEWEST_LAYERS - (len(runs) - 1) * alone)
    counts = [[target.layers[run] for target in targets] for run in runs]
    varied = tuple(run for run in runs if max(counts[run]) > fewest + 1)
    if any(len(set(counts[run])) > 1 for run in runs if run not in varied):
        return None
    if together and (not varied or len({counts[run][0] for run in runs}) > 1):
        return None
    layers = tuple(fewest if run in varied else counts[run][0] for run in runs)
    alive = [target.alive for target in targets]
    vary_alive = shorter and (max(alive) > FEWEST_ALIVE + 1 or max(alive) > min(alive))
    if not varied and not (vary_alive and max(alive) > FEWEST_ALIVE + 3 * deepening):
        return None  # few layers, and few micro-batches alive
    first = FEWEST_ALIVE + (max(alive) - FEWEST_ALIVE) % deepening if vary_alive else alive[0]
    deeper = first + deepening * vary_alive
    passing = max(first, deeper - 1, length(first) - 2, length(deeper) - 2)  # more pass than the deeper one keeps alive
    base = Point(layers, first, _few(targets[0].micro_batches, passing, micro_step))
    more_layers = tuple(count + 2 * (run in varied) for run, count in enumerate(layers))
    more_alive = min(max(alive), first + 2 * deepening) if vary_alive else first
    passing = max(base.micro_batches, more_alive, length(more_alive) - 2)
    more_micro = _few(targets[0].micro_batches, passing, micro_step)
    check = Point(more_layers, more_alive, more_micro)
    return Design(base, varied, vary_alive, _passing_at(base, targets[0], micro_step), check, together, deepening)


def whole_stage(
    target: Point,
    micro_step: int = 1,
    small: Point | None = None,
    small_step: int = 1,
    length: Callable[[int], int] = int,
) -> Design:
    """The simulations of a stage with all its layers and few micro-batches; the stage itself where that is one of them.

    Args:
        small: two simulations, but for their micro-batches, that tell what a micro-batch more costs; None: one layer of each
            run, and as many alive.
        small_step: their micro-batches come in multiples of this.
        length: as of :func:`design_for`.
    """

    def with_few(point: Point, step: int) -> Point:
        passing = point.alive if point.short else max(point.alive, length(point.alive) - 2)
        return replace(point, micro_batches=_few(target.micro_batches, passing, step))

    base = with_few(target, micro_step)
    small, step = (small, small_step) if small else (replace(target, layers=(1,) * len(target.layers)), micro_step)
    passing = _passing_at(with_few(small, step), target, step)
    return exact_stage(target) if base == target or not passing else Design(base, (), False, passing, None)


def exact_stage(target: Point) -> Design:
    """A stage just as it is."""
    return Design(target, (), False, None, None)


def _few(most: int, alive: int, step: int) -> int:
    """Two micro-batches (or steps of them) more than are alive, so that some pass through the full pipeline."""
    few = -(-alive // step) * step + 2 * step if step > 1 else alive + 2
    return few if few < most and (most - few) % step == 0 else most


def _passing_at(base: Point, target: Point, micro_step: int) -> tuple[Point, Point] | None:
    """``base``, and the same with more micro-batches, where the target has more."""
    more = replace(base, micro_batches=base.micro_batches + micro_step)
    return (base, more) if target.micro_batches > base.micro_batches else None


def _without_chance(passing: Moments) -> tuple[Moments, Fill]:
    """What more micro-batches add to each kind of moment, and to most of them.

    A result of an operator that is there for the rest of the step is there at most moments. What single ones have more or less
    of results is chance, such as the lookup of the next micro-batch, and does not grow.
    """
    usual = _most_common(passing.values())
    stays = {use: size for use, size in usual.items() if use.category in OF_OPERATORS}
    return {
        kind: stays | {use: size for use, size in fill.items() if use.category not in OF_OPERATORS}
        for kind, fill in passing.items()
    }, usual


def _most_common(fills: Iterable[Fill]) -> Fill:
    """The fill that most of them are, the smallest of these: of what is there all the time, every moment has as much."""
    counts = Counter(frozenset(fill.items()) for fill in fills)
    ranked = ((count, -sum(abs(size) for _, size in fill), fill) for fill, count in counts.items())
    return dict(max(ranked, key=lambda one: one[:2])[2]) if counts else {}


def _inputs(target: Point, fills: Mapping[Point, Fill]) -> dict[Use, int]:
    """The inputs that one of the simulations has at a moment, with the rows of all micro-batches.

    Whether they are there at that moment is the runtime's affair and differs between simulations, so they are not linear.
    """
    sizes: dict[Use, int] = {}
    for point, fill in fills.items():
        for use, size in fill.items():
            if use.is_input:
                sizes[use] = max(sizes.get(use, 0), size * target.micro_batches // point.micro_batches)
    return sizes


def _now_and_then(fills: Mapping[Point, Fill]) -> dict[Use, int]:
    """What some of the simulations do not have at a moment: as much as the one with most."""
    uses = {use for fill in fills.values() for use in fill if not use.is_input}
    return {
        use: max(fill.get(use, 0) for fill in fills.values())
        for use in uses
        if not all(use in fill for fill in fills.values())
    }


def _combined(parts: Sequence[tuple[int, Fill]]) -> dict[Use, int]:
    sums: dict[Use, int] = {}
    for factor, fill in parts:
        for use, size in fill.items() if factor else ():
            if not use.is_input:
                sums[use] = sums.get(use, 0) + factor * size
    return {use: size for use, size in sums.items() if size}
