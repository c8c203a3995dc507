"""A plan in the forms of other trainers: the order of passes as PyTorch reads it, the split as Megatron-LM does.

PyTorch's pipelining, and so torchtitan by ``pipeline_parallel_schedule_csv``, has a row of actions for each rank: ``2F0`` is the
forward pass of micro-batch 0 through stage 2, ``B`` a whole backward pass, ``I`` that of the inputs and ``W`` that of the weights
(``torch.distributed.pipelining.schedules``). Its stages are our places in the order of the model: chunk by chunk, and inside a
chunk stage by stage, in every second chunk of a V backwards.

Megatron-LM's ``--pipeline-model-parallel-layout`` has places in the same order, divided by ``|``: ``E`` embedding, ``t`` a layer,
``m`` a layer that predicts ahead, ``L`` the loss; ``*n`` repeats what stands before it (Megatron Core, "Custom Pipeline Model
Parallel Layout").
"""

from __future__ import annotations

import csv
import io
from itertools import groupby

from mindllm.errors import UserError
from mindllm.planning.plan import Evaluation
from mindllm.planning.problem import Problem
from mindllm.schedules.operations import LETTERS
from mindllm.schedules.orders import stage_orders


def torch_schedule(evaluation: Evaluation) -> str:
    """Return the order of passes as PyTorch's pipelining reads it: CSV, a row of actions for each stage of ours.

    All micro-batches stand in it, also where the simulation of a long pipeline left out some that repeat.

    Raises:
        UserError: sequences go through in pieces.
    """
    problem = evaluation.problem
    if problem.pieces > 1:
        raise UserError(f"{problem.name}: PyTorch's pipelining has no pieces of sequences; plan pieces 1")
    orders = stage_orders(problem.schedule, problem.stages, problem.chunks, problem.micro_batches)
    number = {place: position for position, place in enumerate(problem.visits)}
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    for stage, operations in enumerate(orders):
        writer.writerow(
            f"{number[chunk * problem.stages + stage]}{LETTERS[what]}{micro}" for what, chunk, micro in operations
        )
    return written.getvalue()


def megatron_layout(evaluation: Evaluation, layers_ahead: int = 0) -> str:
    """Return the value of ``--pipeline-model-parallel-layout``; the last ``layers_ahead`` layers predict ahead."""
    places = ["t" * count for count in evaluation.plan.counts]
    places[-1] = places[-1][layers_ahead:] + "m" * layers_ahead + "L"
    places[0] = "E" + places[0]
    return "|".join(map(_short, places))


def _short(place: str) -> str:
    """Repeated letters as ``t*4``; commas, which mean nothing, keep a count from what follows."""
    runs = ((letter, len(list(same))) for letter, same in groupby(place))
    return ",".join(f"{letter}*{count}" if count > 1 else letter for letter, count in runs)


def megatron_options(evaluation: Evaluation, layers_ahead: int = 0) -> str:
    """Return the options of Megatron-LM that say the pipeline and its split, a line each.

    Recomputation is left out: Megatron-LM has one number of layers for all stages, where a plan has one for each.

    Raises:
        UserError: the plan lies in a V, which Megatron-LM has no layout for.
    """
    problem: Problem = evaluation.problem
    if problem.v_shape:
        raise UserError(f"{problem.name}: Megatron-LM's layout has no V; plan schedule 1f1b, or write --torch_csv")
    lines = [
        f"--pipeline-model-parallel-size {problem.stages}",
        f'--pipeline-model-parallel-layout "{megatron_layout(evaluation, layers_ahead)}"',
    ]
    return "\n".join(lines) + "\n"
