"""Runs reduced to one stage: the other stages become smaller, or a small pipeline has a stage of the large run.

The graph of a stage depends on other stages only through exchanged tensors, which have the same shape after every layer. What
layers add to the loss passes only through layers that add to it. The compiler, however, reads and differentiates
the layers of all stages before it cuts the pipeline. Widths do not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mindllm.architecture.layer_counts import places_in_order
from mindllm.architecture.layer_kind import LayerKind
from mindllm.config import RunConfig, override_config
from mindllm.config.checks.mesh import compiles_for
from mindllm.parallel.layer_plan import LayerAssignment, LayerPlan, make_plan
from mindllm.parallel.stages import FIRST, MIDDLE, ONLY, Run, Stage
from mindllm.reduced_runs.layers import placed_layers, unfolded

PLAIN = LayerKind()
NODE = 8  # MindSpore takes more devices than these in eights only, and fewer as powers of two
IN_LISTS = ("layers", "dropout_keys")  # of a model, with a cell for each layer
LAYER_NUMBER = re.compile(
    "(?:" + "|".join(rf"(?<=\b{name}{mark})" for name in IN_LISTS for mark in ("-CellList/", r"\.")) + r")\d+(?!\w)"
)
"""In the scope of an operator, the path of a cell or the name of a parameter."""


def reduce_other_stages(config: RunConfig, stage: int) -> tuple[RunConfig, Callable[[str], str]]:
    """Return a run that has the same graph on ``stage``; other stages keep the last layer of each chunk.

    Layers that predict ahead are kept: they read the embedding of the first stage. The second result gives an operator's or
    parameter's name in that run the layer number of the whole run.
    """
    plan, model = make_plan(config), config.model.config
    first_mtp = model.num_layers - 1  # layers that predict ahead are like the last one
    places = [(layer.chunk, layer.stage) for layer in plan.layers]
    selected = [
        number
        for number, place in enumerate(places)
        if place[1] == stage or number >= first_mtp or place != places[number + 1]
    ]
    smaller = replace(plan, layers=tuple(plan.layers[number] for number in selected))
    changes = placed_layers(model, [model.architecture.layers[number] for number in selected], smaller)
    return override_config(config, changes), lambda name: LAYER_NUMBER.sub(
        lambda found: str(selected[int(found[0])]), name
    )


@dataclass(frozen=True)
class Point:
    """The size of a stage: layers in each of its runs, live micro-batches, and micro-batches of a step.

    Without a pipeline ``micro_batches`` are accumulation steps. ``short``: use the fewest stages that represent this one,
    with that many chunks and those with other kinds of layers; live micro-batches then do not matter.
    """

    layers: tuple[int, ...]
    alive: int
    micro_batches: int
    short: int = 0


def point_of(stage: Stage, config: RunConfig) -> Point:
    """Return the size of the stage in the real run."""
    return Point(tuple(run.count for run in stage.runs), stage.alive, micro_batches_of(config))


def micro_batches_of(config: RunConfig) -> int:
    """Return the micro-batches of a step in a pipeline, else the accumulation steps."""
    return config.parallel_config.micro_batch_num * config.runner_config.gradient_accumulation_steps


def reduce_to_stage(config: RunConfig, like: Stage, point: Point) -> tuple[RunConfig, int]:
    """Return a run with a stage like ``like`` at ``point``, and the first rank of that stage.

    A stage keeps as many micro-batches alive as there are stages from it on, so the small pipeline has that length. If MindSpore
    requires a longer one, there are more micro-batches, too. With several chunks per stage the pipeline keeps its length,
    unless ``point`` is of a short one.
    """
    stages, number, chunks = _pipeline(config, like, point)
    v_shape = chunks > 1 and config.parallel.pipeline_config.v_shape
    last = places_in_order(stages, chunks, v_shape)[-1]
    kept_chunks = _kept_chunks(like, point, config.model.config.pp_interleave_num)
    pairs = zip(like.runs, point.layers, strict=True)
    runs = [Run(kept_chunks.index(run.chunk), run.kind, count) for run, count in pairs if run.chunk in kept_chunks]
    architecture = config.model.config.architecture
    plain = architecture.main_layers[-1]
    specs = [run.kind.spec or plain for run in runs]
    if plain.adds_to_loss and number == last[1] and not any(spec.adds_to_loss for spec in specs):
        plain = specs[0]  # what earlier layers add to the loss would have nowhere to go
    placed = [
        (kind.spec or plain, LayerAssignment.of_kind(kind, stage, chunk))
        for chunk, stage in places_in_order(stages, chunks, v_shape)
        for kind in (_kinds(runs, chunk) if stage == number else [PLAIN])
    ]
    if number != last[1]:  # layers that predict ahead look up tokens on the last stage, with effects on the first
        mtp_layers = architecture.layers[len(architecture.main_layers) :]
        placed += [(spec, LayerAssignment(last[1], last[0])) for spec in mtp_layers]
    plan = LayerPlan(stages, chunks, tuple(layer for _, layer in placed), v_shape)
    changes = placed_layers(config.model.config, [spec for spec, _ in placed], plan)
    changes |= {} if v_shape else unfolded(config)
    single = like.place == ONLY
    changes |= {"parallel_config.seq_split_num": 1} if single else {}
    changes["runner_config.gradient_accumulation_steps"] = point.micro_batches if single else 1
    fewest = stages * (2 if v_shape else 1)  # that the schedule takes
    changes["parallel_config.micro_batch_num"] = 1 if single else max(point.micro_batches, fewest)
    return override_config(config, changes), number * config.parallel_config.stage_device_num


def reduce_to_layer(config: RunConfig) -> RunConfig:
    """Return a run on the devices of one stage with one layer: every operator of the model, each line of the source, once."""
    single = Stage(0, 0, ONLY, (Run(0, PLAIN, 1),), 1)
    return reduce_to_stage(config, single, Point((1,), 1, 1))[0]


def _pipeline(config: RunConfig, like: Stage, point: Point) -> tuple[int, int, int]:
    """Return the number of stages of the small pipeline, the represented stage, and the chunks per stage."""
    chunks = config.model.config.pp_interleave_num
    if chunks > 1 and like.place != ONLY:
        if point.short:
            return *_short_pipeline(config, like), len(_kept_chunks(like, point, chunks))
        return config.parallel_config.pipeline_stage, like.number, chunks
    if like.place == ONLY:
        return 1, 0, 1
    if like.place == FIRST:
        return max(point.alive, 2), 0, 1
    behind = point.alive if like.place == MIDDLE else 1  # this stage and those after it
    number = stages_before(config, behind, like.number)
    return number + behind, number, 1


def _short_pipeline(config: RunConfig, like: Stage) -> tuple[int, int]:
    """Return the fewest stages that MindSpore accepts, and the represented stage; even shares of micro-batches stay even."""
    full = config.parallel_config.pipeline_stage
    fewest = 3 if like.place == MIDDLE else 2
    stages = next(
        count for count in range(fewest, full + 1) if full % count == 0 and (_compiles(config, count) or count == full)
    )
    return stages, {FIRST: 0, MIDDLE: 1}.get(like.place, stages - 1)


def _kept_chunks(like: Stage, point: Point, chunks: int) -> list[int]:
    """Return the chunk numbers of the small pipeline."""
    chosen = list(range(min(point.short or chunks, chunks)))
    present = {run.kind for run in like.runs if run.chunk in chosen}
    for chunk in range(len(chosen), chunks):
        kinds = {run.kind for run in like.runs if run.chunk == chunk}
        if not kinds <= present:
            chosen.append(chunk)
            present |= kinds
    return chosen


def stages_before(config: RunConfig, behind: int, number: int) -> int:
    """Return the number of stages before a middle stage of a small pipeline that has ``behind`` stages from it on.

    MindSpore must accept the length. If possible the number is odd or even like ``number``: an even stage still holds the
    tensor that it sends while it goes backward, an odd one does not.
    """
    possible = [before for before in range(1, NODE + 1) if _compiles(config, before + behind)] or [NODE]
    return next((before for before in possible if before % 2 == number % 2), possible[0])


def pipeline_length(config: RunConfig, like: Stage, alive: int, short: int = 0) -> int:
    """Return the stages of the small pipeline where a stage like ``like`` keeps ``alive`` micro-batches, or of a short one."""
    return _pipeline(config, like, Point((), alive, 0, short))[0]


def pipeline_places(config: RunConfig, like: Stage, point: Point) -> int:
    """Return the chunks of all stages of the pipeline that has a stage like ``like`` at ``point``."""
    stages, _, chunks = _pipeline(config, like, point)
    return stages * chunks


def chunks_of(config: RunConfig, like: Stage, point: Point) -> int:
    """Return the chunks of a stage of that pipeline."""
    return _pipeline(config, like, point)[2]


def middle_deepening(config: RunConfig, number: int) -> int:
    """Return the number of stages by which pipelines grow so that a middle stage stays odd or even."""
    first, second = (stages_before(config, alive, number) for alive in (2, 3))
    return 1 if first % 2 == second % 2 else 2


def can_be_first(config: RunConfig, alive: int) -> bool:
    """Return True if MindSpore accepts the pipeline whose first stage keeps ``alive`` micro-batches."""
    return _compiles(config, max(alive, 2))


def _compiles(config: RunConfig, stages: int) -> bool:
    """Return True if MindSpore accepts a pipeline with this number of stages like those of ``config``."""
    return compiles_for(config.parallel_config.stage_device_num, stages)


def deepening(config: RunConfig, fewest: int, most: int) -> int | None:
    """Return the fewest stages by which pipelines from ``fewest`` to ``most`` stages can grow; None if impossible."""
    return next(
        (
            more
            for more in range(1, most - fewest + 1)
            if (most - fewest) % more == 0
            and all(_compiles(config, stages) for stages in (fewest, fewest + more, min(most, fewest + 2 * more)))
        ),
        None,
    )


def _kinds(runs: Sequence[Run], chunk: int) -> list[LayerKind]:
    return [run.kind for run in runs if run.chunk == chunk for _ in range(run.count)]
