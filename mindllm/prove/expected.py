"""What formulas say before anything is proved: whether it fits, how long a step takes, how large checkpoints are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.checks.checkpoints import answered
from mindllm.prove.questions import CONFIGURATION, MEMORY, STEP_TIME
from mindllm.prove.remedy import LIMIT, formula_remedy
from mindllm.timing.device import Device, read_device
from mindllm.timing.prediction import StepPrediction, predict
from mindllm.timing.verdict import Room
from mindllm.units import TENTHS_OF_GB, counted, parameters_in_words


def configuration(config: RunConfig) -> Answer:
    """Return the answer that loading a configuration has given: it is sound."""
    name = config.trainer.model_name or config.model.config.type
    devices = counted(config.parallel_config.device_num, "device")
    says = f"{name}, {parameters_in_words(config.model.config.parameter_count())} on {devices}"
    return Answer(
        CONFIGURATION, Standing.PROVED, "; ".join(filter(None, [says, config.about_parameters, config.about_mode]))
    )


def expected(config: RunConfig, device: str, remedies: bool = False) -> Iterator[Answer]:
    """Yield analytical estimates, for the questions that have one; they are of devices, not of a CPU.

    With ``remedies`` a run that does not fit comes with the keys that change that.
    """
    if config.context.device_target != "CPU":
        yield from _of_a_device(config, device, remedies)
    yield _as_expected(answered(config))


def left_open(config: RunConfig, device: str) -> tuple[str, ...]:
    """Return the questions that no proof of a run on a CPU answers, nor keeps it from being ready for.

    MindSpore's dry run is of Ascend devices; a step is predicted where ``device`` describes the CPU.
    """
    if config.context.device_target != "CPU":
        return ()
    return (MEMORY,) if read_device(device).device_target == "CPU" else (MEMORY, STEP_TIME)


def _of_a_device(config: RunConfig, device: str, remedies: bool) -> Iterator[Answer]:
    """Yield the estimates of memory and step time."""
    known = read_device(device)
    try:
        predicted = predict(config, known)
    except UserError as error:
        reason = Finding(str(error))
        for question in (MEMORY, STEP_TIME):
            yield Answer(question, Standing.EXPECTED, "no formula: it has something that is not modelled", (reason,))
    else:
        yield _memory(config, known, predicted.memory, remedies)
        says = f"{predicted.in_words} a step on {known.name}, {predicted.model_flops_utilisation:.1%} MFU"
        yield Answer(STEP_TIME, Standing.EXPECTED, says, figures=step_figures(predicted))


def _memory(config: RunConfig, device: Device, room: Room, remedies: bool) -> Answer:
    """Return the estimate of memory."""
    stages = [{"stage": number, "peak": size} for number, size in enumerate(room.stages)]
    sizes = {"peak": max(room.stages), "limit": room.limit, "reserved": room.reserved, "usable": room.usable}
    figures = {**sizes, "fits": room.fits, "stages": stages}
    if room.fits:
        says = f"stage {room.stage} takes {TENTHS_OF_GB(max(room.stages))} of {room.bound}"
        return Answer(MEMORY, Standing.EXPECTED, says, figures=figures)
    advice = formula_remedy(config, device, room) if remedies else ""
    reason = Finding(room.short, advice, LIMIT)
    return Answer(MEMORY, Standing.EXPECTED, f"does not fit: it {room}", (reason,), figures=figures)


def step_figures(predicted: StepPrediction) -> dict[str, Any]:
    """Return a predicted step for programs and the page: its stages, and the passes that its schedule is made of."""
    step = predicted.step
    accumulation = step.workload.strategy.accumulation
    return {**predicted.tree(), "passes": step.times.tree(), "accumulation": accumulation}


def _as_expected(answer: Answer) -> Answer:
    return Answer(answer.question, Standing.EXPECTED, answer.says, answer.findings, figures=answer.figures)
