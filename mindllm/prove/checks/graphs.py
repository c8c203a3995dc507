"""What recomputation saves, what the compiler exchanges that nobody asked for, and whether dtypes are those of the YAML: from the
graphs of stages at their widths.

A stage is compiled with one layer of each kind it has; as few stages are compiled as have all kinds of layers and both ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mindllm.architecture.layer_kind import LayerKind
from mindllm.compiled.conformance.dtypes import dtypes
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph
from mindllm.compiled.graph.file import load, save
from mindllm.compiled.graph.operators import Operators
from mindllm.compiled.inspect.page import render_page
from mindllm.compiled.inspect.recompute import Effect, recomputation
from mindllm.compiled.inspect.redundant import LayoutChange, layout_changes
from mindllm.compiled.inspect.source import Inspected
from mindllm.compiled.inspect.tables import size_text
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import RunConfig
from mindllm.dry_run.simulations import RESULTS, rank_key
from mindllm.errors import UserError
from mindllm.parallel.stages import Stage, stages_of
from mindllm.prove.answers import Answer, Finding, Page, Standing, Table
from mindllm.prove.checks.obeyed import obeyed
from mindllm.prove.checks.step_time import described
from mindllm.prove.pieces import Options
from mindllm.prove.questions import COMMUNICATION, CONFORMANCE, RECOMPUTATION
from mindllm.reduced_runs.stage import Point, micro_batches_of, reduce_to_stage
from mindllm.terminal.progress import Progress
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.device import Device
from mindllm.timing.prediction import predict
from mindllm.units import counted

DEAR = 0.01  # of a step: exchanges that nobody asked for and that take more refute a run
EXCLUDES = "exclude"
FEWEST_CHUNKS = 2  # that take turns
OF_RECOMPUTATION = re.compile(r"(?P<key>recompute_config[\w.]*): (?P<message>.*)", re.DOTALL)
"""In what the process says that compiles: patterns are looked up in the built model alone."""


@dataclass(frozen=True)
class Compiled:
    """A stage that was compiled: with one layer of each kind of ``stage``, under the configuration ``small``."""

    stage: Stage
    small: RunConfig
    graph: CompiledGraph


def answers(config: RunConfig, options: Options, progress: Progress) -> Iterator[Answer]:
    """Compile stages and answer all three questions."""
    chosen = chosen_stages(stages_of(config))
    compiled = []
    try:
        for done, stage in enumerate(chosen):
            progress(f"compiling stage {stage.number} with a layer of each kind", done, len(chosen))
            compiled.append(_compiled(config, stage))
    except UserError as error:
        if not (said := OF_RECOMPUTATION.search(str(error))):
            raise
        reason = Finding(said["message"], "", said["key"])
        yield Answer(RECOMPUTATION, Standing.REFUTED, "what is asked for cannot be recomputed", (reason,))
        for question in (COMMUNICATION, CONFORMANCE):
            yield Answer(question, Standing.NOT_PROVED, "no graph, because of recomputation", (reason,))
        return
    yield _recomputation(compiled)
    yield replace(_communication(config, compiled, options), pages=(_page(config, compiled[0]),))
    found = dtypes(config, [Operators(one.graph) for one in compiled])
    yield obeyed([found], "in the dtypes of the run", "dtypes are the YAML's")


def chosen_stages(stages: Sequence[Stage]) -> list[Stage]:
    """Return few stages that have all kinds of layers: both ends, and others that have what these lack."""
    ends = [stages[0], *stages[1:][-1:]]
    seen: set[LayerKind] = {run.kind for stage in ends for run in stage.runs}
    chosen = list(ends)
    for stage in stages[1:-1]:
        kinds = {run.kind for run in stage.runs}
        if not kinds <= seen:
            chosen.append(stage)
            seen |= kinds
    return chosen


def _page(config: RunConfig, one: Compiled) -> Page:
    """The graph of a stage, to look at."""
    name = config.trainer.model_name or config.model.config.type
    title = f"{name}, stage {one.stage.number}: a layer of each kind"
    return Page(f"the graph of stage {one.stage.number}", "graph.html", render_page(one.graph, title, to_proof=True))


def _compiled(config: RunConfig, stage: Stage) -> Compiled:
    """The graph of a stage, kept as those are that the planner compiles."""
    small, rank = with_each_kind(config, stage)
    graph = RESULTS.get(rank_key(small, rank, "graph"), lambda: compile_rank(small, rank), load, save)
    return Compiled(stage, small, graph)


def with_each_kind(config: RunConfig, stage: Stage) -> tuple[RunConfig, int]:
    """Return a run with a layer of each kind of a stage and as few micro-batches as can be, and the stage's first rank.

    Of several chunks two are left, but in a V, which has no more.
    """
    short = 0 if config.parallel.pipeline_config.v_shape else FEWEST_CHUNKS
    few = Point((1,) * len(stage.runs), 1, 2 if config.parallel_config.pipeline_stage > 1 else 1, short)
    return reduce_to_stage(config, stage, few)


def _recomputation(compiled: Sequence[Compiled]) -> Answer:
    effects = _best_effects(
        effect
        for one in compiled
        for effect in recomputation(Inspected(one.graph, f"stage {one.stage.number}", one.small)).effects
    )
    if not effects:
        return Answer(RECOMPUTATION, Standing.PROVED, "the YAML asks for none, and none happens")
    names = ("key", "pattern", "matched", "repeated", "saved", "at best")
    rows = tuple(
        (item.key, item.pattern, str(item.matched), str(item.repeated), size_text(item.saved), size_text(item.yielded))
        for item in effects
    )
    table = Table("saved for each layer and micro-batch", names, rows)
    figures = {"patterns": [vars(effect) for effect in effects]}
    findings = tuple(
        Finding(
            f"{item.pattern} saves {size_text(item.saved)} of {size_text(item.yielded)}: {item.why}", "", _key(item)
        )
        for item in effects
        if item.why
    )
    asked = sum(EXCLUDES not in item.key for item in effects)
    if findings:
        says = f"{len(findings)} of {asked} patterns save next to nothing"
        return Answer(RECOMPUTATION, Standing.REFUTED, says, findings, tables=(table,), figures=figures)
    says = f"{counted(asked, 'pattern')} {'saves' if asked == 1 else 'save'} what can be saved"
    return Answer(RECOMPUTATION, Standing.PROVED, says, tables=(table,), figures=figures)


def _best_effects(effects: Iterable[Effect]) -> list[Effect]:
    """Of each pattern what it does where it does most: a stage may lack the operators that it names."""
    best: dict[tuple[str, str], Effect] = {}
    for effect in effects:
        known = best.get((effect.key, effect.pattern))
        if known is None or (effect.saved, effect.matched) > (known.saved, known.matched):
            best[effect.key, effect.pattern] = effect
    return list(best.values())


def _key(effect: Effect) -> str:
    return f"recompute_config.{effect.key}"


def _communication(config: RunConfig, compiled: Sequence[Compiled], options: Options) -> Answer:
    found = [(one, change) for one in compiled for change in layout_changes(one.graph)]
    device = described(options)
    costs = [(change, one, change.bytes * _runs(config, one, change)) for one, change in found if change.bytes]
    seconds = [_seconds(config, change, one, device) for change, one, _ in costs]
    try:
        step = predict(config, device).seconds
    except UserError:
        step = math.nan
    rows = tuple(
        (
            str(one.stage.number),
            change.producer,
            change.consumer,
            " ".join(change.chain),
            size_text(size),
            f"{cost:.4f}",
        )
        for (change, one, size), cost in zip(costs, seconds, strict=True)
    )
    table = Table("exchanges nobody asked for", ("stage", "from", "to", "by", "bytes a step", "s a step"), rows)
    figures = {"bytes": sum(size for *_, size in costs), "seconds": sum(seconds), "copies": len(found) - len(costs)}
    evidence = (f"{len(found) - len(costs)} layout changes copy within a rank and exchange nothing",)
    if not costs:
        return Answer(COMMUNICATION, Standing.PROVED, "none", (), evidence, figures=figures)
    told = f"{size_text(figures['bytes'])} a step, about {sum(seconds):.3g} s"
    if math.isnan(step):
        reason = Finding("its share of a step is not known: the step has something that is not modelled")
        return Answer(COMMUNICATION, Standing.NOT_PROVED, told, (reason,), evidence, (table,), figures)
    share = sum(seconds) / step
    says = f"{told}, {share:.1%} of a step"
    findings = tuple(
        Finding(f"{change.producer} -> {change.consumer}: {' -> '.join(change.chain)}", change.fix)
        for (change, *_), cost in zip(costs, seconds, strict=True)
        if cost >= DEAR * step
    )
    standing = Standing.REFUTED if share >= DEAR else Standing.PROVED
    return Answer(
        COMMUNICATION, standing, says, findings if standing is Standing.REFUTED else (), evidence, (table,), figures
    )


def _runs(config: RunConfig, one: Compiled, change: LayoutChange) -> int:
    """How often it happens in a step of the stage as it is: in each of its layers and micro-batches, and back again."""
    in_layer = ".layers." in f".{change.place}."
    layers = one.stage.layers if in_layer else 1
    return 2 * micro_batches_of(config) * (layers if change.layers > 1 or in_layer else 1)


def _seconds(config: RunConfig, change: LayoutChange, one: Compiled, device: Device) -> float:
    """About how long it takes in a step: its exchanges are taken to be among ranks that share a layer's weights."""
    sizes = config.parallel_config
    group = Group(max(2, sizes.model_parallel * sizes.context_parallel))
    op = next((name for name in change.chain if name in COLLECTIVES), "AllGather")
    return _runs(config, one, change) * exchange_seconds(op, float(change.bytes), group, device)
