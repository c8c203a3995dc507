"""Plans in the formats of other trainers: the order of passes for PyTorch, the split for Megatron-LM.

PyTorch's pipelining, and torchtitan with ``pipeline_parallel_schedule_csv``, reads a row of actions for each rank. ``2F0`` is
the forward pass of micro-batch 0 through stage 2, ``B`` a whole backward pass, ``I`` its gradients of inputs, ``W`` its gradients
of weights (``torch.distributed.pipelining.schedules``). Its stages are our places in model order: chunk by chunk, and inside a
chunk stage by stage, backwards in the second chunk of a V.

Megatron-LM's ``--pipeline-model-parallel-layout`` has places in the same order, divided by ``|``: ``E`` embedding, ``t`` a layer,
``m`` a layer that predicts ahead, ``L`` the loss; ``*n`` repeats the letter before it (Megatron Core, "Custom Pipeline Model
Parallel Layout").
"""

from __future__ import annotations

import csv
import io
from itertools import groupby

from mindllm.errors import UserError
from mindllm.planning.plan import Evaluation
from mindllm.schedules.operations import LETTERS
from mindllm.schedules.orders import stage_orders


def torch_schedule(evaluation: Evaluation) -> str:
    """Return the order of passes as PyTorch's pipelining reads it: CSV, a row of actions for each stage.

    It has all micro-batches, also if the simulation of a long pipeline left out some that repeat.

    Raises:
        UserError: sequences are cut into pieces.
    """
    problem = evaluation.problem
    if problem.pieces > 1:
        raise UserError(f"{problem.name}: PyTorch's pipelining does not support pieces of sequences; plan pieces 1")
    orders = stage_orders(problem.schedule, problem.stages, problem.chunks, problem.micro_batches)
    torch_stage = {place: position for position, place in enumerate(problem.visits)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for stage, operations in enumerate(orders):
        writer.writerow(
            f"{torch_stage[chunk * problem.stages + stage]}{LETTERS[kind]}{micro}" for kind, chunk, micro in operations
        )
    return text.getvalue()


def megatron_layout(evaluation: Evaluation, mtp_layers: int = 0) -> str:
    """Return the value of ``--pipeline-model-parallel-layout``; the last ``mtp_layers`` layers predict ahead."""
    places = ["t" * count for count in evaluation.plan.counts]
    places[-1] = places[-1][mtp_layers:] + "m" * mtp_layers + "L"
    places[0] = "E" + places[0]
    return "|".join(map(_run_lengths, places))


def _run_lengths(letters: str) -> str:
    """Return repeated letters as ``t*4``; a comma, which has no meaning, separates a count from the next letter."""
    runs = ((letter, len(list(run))) for letter, run in groupby(letters))
    return ",".join(f"{letter}*{count}" if count > 1 else letter for letter, count in runs)


def megatron_options(evaluation: Evaluation, mtp_layers: int = 0) -> str:
    """Return the options of Megatron-LM for the pipeline and its split, one per line.

    Recomputation is left out: Megatron-LM has one number of layers for all stages, a plan has one per stage.

    Raises:
        UserError: the plan is a V, which Megatron-LM does not support.
    """
    problem = evaluation.problem
    if problem.v_shape:
        raise UserError(f"{problem.name}: Megatron-LM has no V layout; plan schedule 1f1b, or write --torch_csv")
    lines = [
        f"--pipeline-model-parallel-size {problem.stages}",
        f'--pipeline-model-parallel-layout "{megatron_layout(evaluation, mtp_layers)}"',
    ]
    return "\n".join(lines) + "\n"
