"""Where ranks of a program begin to differ from the program on one device: the step that differs, with every value kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mindllm.compiled.execute.comparer import Comparer
from mindllm.compiled.execute.records import Record, Recorder
from mindllm.compiled.execute.state import slices_of
from mindllm.compiled.foreign.lockstep import Program, ProgramRank
from mindllm.parallel.layout import Mesh

ROUNDING = 1e-5
"""Of the largest magnitude of a value, in fp32; where it finds no operator, what the check itself allows."""
Error = Callable[[np.ndarray, np.ndarray], float]


def place_of_difference(
    ranks: Sequence[ProgramRank], alone: ProgramRank, stages: int, step: int, tolerance: float, error: Error
) -> str:
    """Describes the first operator that differs in step number ``step`` (from 1); empty where none is found.

    Where the compiler cuts no parameter, ranks have rows of their own and average gradients themselves.

    ``error`` says how far a value is from the single device's, as a share of its largest element.
    """
    program, recorder, outputs = _recorded(ranks, stages, step)
    device, reference, said = _recorded([alone], 1, step)
    with np.errstate(all="ignore"):
        averaged = not any(parameter.layout for rank in ranks for parameter in rank.graph.parameters.values())
        wrong = [*_wrong_parameters(program, device, recorder, tolerance, error)]
        if not averaged:  # in data parallel a rank returns the loss of rows of its own
            wrong += _wrong_outputs(program, outputs, said, recorder, tolerance, error)
        mesh = Mesh(data_parallel=program.stage_devices, pipeline_stage=stages)
        graphs = [rank.graph for rank in ranks]
        for allowed in (ROUNDING, tolerance):
            comparer = Comparer(recorder.records, reference.records, graphs, mesh, allowed, averaged)
            if found := comparer.first_difference(wrong):
                return found.describe()
    return comparer.explained(wrong[0]).describe() if wrong else ""


def _recorded(ranks: Sequence[ProgramRank], stages: int, step: int) -> tuple[Program, Recorder, Mapping[int, Any]]:
    program, recorder = Program(ranks, stages), Recorder()
    for number in range(1, step):
        program.step(number)
    for machine in program.machines:
        machine.observer = recorder
    return program, recorder, program.step(step)


def _wrong_parameters(
    program: Program, device: Program, recorder: Recorder, tolerance: float, error: Error
) -> Iterator[Record]:
    values = device.machines[0].values()
    for machine in program.machines:
        for name, value in machine.values().items():
            if name not in values or value.dtype.kind != "f" or not value.size:
                continue
            part = values[name][slices_of(machine.graph.parameters[name], machine.rank)]
            changer = recorder.changer(machine.rank, name)
            if changer is not None and not error(value, part) <= tolerance:
                yield changer


def _wrong_outputs(
    program: Program,
    outputs: Mapping[int, Any],
    said: Mapping[int, Any],
    recorder: Recorder,
    tolerance: float,
    error: Error,
) -> Iterator[Record]:
    """What yields a result of the last stage that is not the single device's."""
    (single,) = said.values()
    for machine in program.machines[-program.stage_devices :]:
        for found, wanted in zip(_flat(outputs[machine.rank]), _flat(single), strict=False):
            maker = recorder.maker(machine.rank, found)
            if maker is None or found.dtype.kind != "f" or found.shape != wanted.shape or not found.size:
                continue
            if not error(found, wanted) <= tolerance:
                yield maker


def _flat(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, np.ndarray):
        yield value
