"""Save what all ranks have, and continue from it on the ranks and on a single device.

The ranks save a checkpoint after the first step, as a run does. It is loaded twice, and the last step is trained from there.
Its loss, weights and optimizer state must equal those without a resume: a moment that is not restored changes every weight, but
no loss of this step. A checkpoint contains whole tensors, so any layout between these two reads it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mindllm.compiled.execute.cluster import ClusterStep
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.config import RunConfig
from mindllm.process.temporary import temporary_directory
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.checkpoint.parts import Part
from mindllm.verify.compare import cluster_parts, is_loss_problem
from mindllm.verify.side import Reference, build_cluster, compare_step, run_step
from mindllm.verify.single import SingleDevice, Task

SHOWN = 3  # problems of each side; lost state changes every weight
ResumedStep = tuple[ClusterStep, Mapping[int, Mapping[str, Part]]]
"""A step after a resume, and the parts of each rank after it."""


def resume_problems(config: RunConfig, graphs: Sequence[CompiledGraph], reference: Reference) -> tuple[str, ...]:
    """Return how a step after a resume differs from one without it; empty if it does not.

    Args:
        config: the small run.
        graphs: of all its ranks.
        reference: a single device that has trained all steps. It ends in the resumed state.

    Raises:
        UserError: the state cannot be saved or loaded.
    """
    first, *others = reference.tasks
    trained = build_cluster(config, list(graphs), reference.initial_state(0))
    run_step(trained, config, first)
    with temporary_directory("mindllm_resume_") as directory:
        path = CheckpointStore(Path(directory), keep_checkpoint_max=1).save(1, trained.local_state(), {"step": 1})
        del trained  # frees its memory
        checkpoint = load_checkpoint(path)
        cluster = build_cluster(
            config, list(graphs), {**reference.frozen, **checkpoint.weights, **checkpoint.optimizer}
        )
        resumed: dict[str, ResumedStep] = {}
        resumed["its own layout"] = run_step(cluster, config, others[-1]), cluster_parts(cluster)
        del cluster
        # replaces the weights and the state of a later step
        reference.device.engine.load(checkpoint)
        resumed["a single device"] = _run_single(reference.device, others[-1])
    lines = []
    for layout, (step, ranks) in resumed.items():
        problems = compare_step(config, reference, len(others), step, ranks).problems()
        if config.optimizer.block:  # rounding changes a code of a moment, and then a weight in the next step
            problems = [problem for problem in problems if is_loss_problem(problem)]
        for problem in problems[:SHOWN]:
            lines.append(f"resumed on {layout}, the next step differs from one without the resume: {problem}")
    return tuple(lines)


def _run_single(device: SingleDevice, task: Task) -> ResumedStep:
    result = device.step(task)
    whole = {
        name: Part(array.shape, tuple(slice(0, size) for size in array.shape), array)
        for name, array in device.state().items()
    }
    step = ClusterStep(result.loss, (result.loss,), (result.global_norm,), (result.overflow,), (result.tokens,))
    return step, {0: whole}
