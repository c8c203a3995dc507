"""How long a step takes and how far it is from the best: by the model of time, the planner's bound, and if asked the search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindllm.config import RunConfig
from mindllm.errors import CheckFailed, UserError
from mindllm.planning import subject
from mindllm.planning.outcome import PipelinePlan, make_plan
from mindllm.planning.plan import comparable_steps
from mindllm.planning.reports.picture import KINDS
from mindllm.planning.reports.plan import gap_text
from mindllm.planning.reports.schedule_page import render_page
from mindllm.prove.answers import Answer, Finding, Page, Standing, Table, of_error
from mindllm.prove.expected import step_figures
from mindllm.prove.pieces import Options
from mindllm.prove.questions import STEP_TIME
from mindllm.terminal.progress import Progress
from mindllm.timing.device import DEFAULT, Device, read_device
from mindllm.timing.prediction import StepPrediction, predict
from mindllm.timing.verdict import implausible
from mindllm.units import MILLISECONDS

if TYPE_CHECKING:
    from mindllm.strategies.outcome import Strategies

PLAN_SECONDS = 5.0
FASTER = 0.20  # a strategy so much faster refutes that of a run; a plan does where a stage works so much longer than the mean
MOST_DRAWN = 40_000  # passes of a schedule that a page may have
OFFSET = "model.model_config.offset"


def answers(config: RunConfig, options: Options, progress: Progress) -> Iterator[Answer]:
    """Answer how long a step takes, with the bound of all plans."""
    device = described(options)
    if config.context.device_target == "CPU" and device.device_target != "CPU":
        ways = "give --device FILE of mindllm time calibrate --here, or --context.device_target=Ascend"
        reason = Finding("no CPU is described (value CPU)", ways, "context.device_target")
        yield Answer(STEP_TIME, Standing.NOT_PROVED, "a step on a CPU is not predicted", (reason,))
        return
    progress("predicting a step")
    try:
        predicted = predict(config, device)
    except UserError as error:
        yield Answer(STEP_TIME, Standing.NOT_PROVED, "it has something that is not modelled", of_error(error))
        return
    progress("planning for the bound")
    planned, unplanned = _planned(config, device)
    slower = list(_slower(planned))
    findings = [*_doubts(predicted), *(slower if _uneven(planned) else ())]
    pages = [*_page(planned)] if planned else []
    unsearched: tuple[Finding, ...] = ()
    if options.search:
        progress("searching strategies")
        try:
            strategies, best = _searched(config, device)
        except (UserError, CheckFailed) as error:
            unsearched = (Finding(f"no search: {error}", "", "parallel_config"),)
        else:
            findings += _slower_than_search(predicted, best)
            pages.append(Page("all strategies", "strategies.html", strategies.render_page(to_proof=True)))
    standing = Standing.REFUTED if findings else Standing.NOT_PROVED if unsearched else Standing.PROVED
    told = tuple(finding for finding in slower if finding not in findings)
    evidence = (_range(device), *_bound_words(planned, unplanned), *_uncounted(predicted))
    figures = {**step_figures(predicted), **(_bound(planned) if planned else {})}
    line, tables = says(predicted) + _distance(planned), (_table(predicted),)
    everything = (*findings, *told, *unsearched)
    yield Answer(STEP_TIME, standing, line, everything, evidence, tables, figures, pages=tuple(pages))


def described(options: Options) -> Device:
    """Return the device that steps are timed on."""
    return read_device(options.device or DEFAULT)


def says(predicted: StepPrediction) -> str:
    """Return a step in a line."""
    return (
        f"{predicted.in_words} a step on {predicted.step.device.name}, "
        f"{predicted.tokens_per_second_per_device:,.0f} tokens/s/device, {predicted.model_flops_utilisation:.1%} MFU"
    )


def _range(device: Device) -> str:
    """How far measured steps were from predicted ones, and which."""
    known = device.step_error
    if known is None:
        return (
            f"how far steps of {device.name} are off is not known: none was measured; mindllm time calibrate finds out"
        )
    return f"about nine of ten measured steps are within {known.value:.0%}: {known.source}"


def _doubts(predicted: StepPrediction) -> Iterator[Finding]:
    if why := implausible(predicted.model_flops_utilisation):
        yield Finding(f"implausible: {why}", "do not trust the step before you know why: mindllm time --explain")


def _planned(config: RunConfig, device: Device) -> tuple[PipelinePlan | None, str]:
    """The best plan of this strategy by formula; or why there is none."""
    if config.parallel_config.pipeline_stage < 2:
        return None, "no pipeline: there is nothing to plan, the bound is the step itself"
    try:
        return make_plan(subject.from_run(config, device), PLAN_SECONDS), ""
    except (UserError, CheckFailed) as error:
        return None, f"no bound: {error}"


def _page(planned: PipelinePlan) -> Iterator[Page]:
    """The schedule of the YAML as it is, to zoom into."""
    before = planned.subject.before
    if before is not None and before.line.table.size <= MOST_DRAWN:
        note = "milliseconds, by formula"
        yield Page("the schedule, to zoom into", "schedule.html", render_page(before, KINDS, note, to_proof=True))


def _gain(planned: PipelinePlan | None) -> float | None:
    """Return how much faster the best plan is than the YAML as it is, by the predicted steps; None if it is not known."""
    before = planned.subject.before if planned else None
    if planned is None or before is None:
        return None
    then, now = comparable_steps(before, planned.best)
    return then / now - 1


def _distance(planned: PipelinePlan | None) -> str:
    gain = _gain(planned)
    if gain is None:
        return ""
    return f", {gain:.1%} above the best plan" if gain > 0 else ", as good as the best plan"


def _slower(planned: PipelinePlan | None) -> Iterator[Finding]:
    gain = _gain(planned)
    if planned is not None and gain is not None and gain > FASTER:
        keys = ", ".join(f"{key} {value}" for key, value in planned.keys.items())
        message = f"another plan of this strategy is {gain:.1%} faster by formula"
        yield Finding(message, f"mindllm plan confirms and writes it: {keys}", OFFSET)


def _uneven(planned: PipelinePlan | None) -> bool:
    """Whether one stage of the YAML works so much longer than all do in the mean.

    Where none does, a better plan recomputes less: that is a choice, which is told and refutes nothing.
    """
    before = planned.subject.before if planned else None
    if before is None:
        return False
    busy = before.line.busy()
    return bool(busy.max() > (1 + FASTER) * busy.mean())


def _searched(config: RunConfig, device: Device) -> tuple[Strategies, StepPrediction]:
    """All strategies of as many devices, and a step of the recommended one; UserError or CheckFailed say that there is none."""
    from mindllm.strategies.outcome import Wanted, find_strategies

    found = find_strategies(config, device, Wanted(None, None, 3, PLAN_SECONDS, None), None)
    return found, predict(found.config, device)


def _slower_than_search(predicted: StepPrediction, best: StepPrediction) -> Iterator[Finding]:
    gain = predicted.seconds / best.seconds - 1
    if gain > FASTER:
        sizes = best.step.workload.strategy
        yield Finding(f"another strategy is {gain:.1%} faster: {sizes}", "mindllm search writes it", "parallel_config")


def _bound(planned: PipelinePlan) -> dict[str, float | None]:
    """Return predicted steps as the YAML is and of the best plan, and the planner's objective with its bound, in seconds."""
    before, bound = planned.subject.before, planned.lower_bound
    return {
        "as_planned": before.reported_step / MILLISECONDS if before else None,
        "best_plan": planned.step_time / MILLISECONDS,
        "objective": planned.objective / MILLISECONDS,
        "lower_bound": bound / MILLISECONDS if bound is not None else None,
        "gap": planned.solution.gap,
    }


def _bound_words(planned: PipelinePlan | None, unplanned: str) -> Iterator[str]:
    if planned is None:
        yield unplanned
        return
    found = _bound(planned)
    if found["as_planned"] is not None:
        yield f"{found['as_planned']:.3f} s a step as the YAML is, {found['best_plan']:.3f} s with the best plan of this strategy"
    if found["lower_bound"] is not None:
        bound = f"no plan of this strategy is below {found['lower_bound']:.3f} s"
        yield f"planner's objective {found['objective']:.3f} s, {bound}: gap {gap_text(planned.solution)}"


def _uncounted(predicted: StepPrediction) -> Iterator[str]:
    if predicted.step.uncounted:
        yield f"not counted: {'; '.join(predicted.step.uncounted)}"


def _table(predicted: StepPrediction) -> Table:
    """Seconds of a step on every stage, by cause."""
    columns = ("stage", "compute s", "tensor parallel s", "sends s", "replicas s", "update s", "bubble s")
    rows = tuple(
        (
            str(stage.stage),
            *(
                f"{seconds:.3f}"
                for seconds in (
                    sum(stage.compute.values()),
                    sum(stage.exchanged.values()),
                    stage.sends,
                    stage.replicas,
                    stage.update,
                    stage.bubble,
                )
            ),
        )
        for stage in predicted.stages
    )
    return Table("where a step goes", columns, rows)
