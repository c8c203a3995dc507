"""Whether training goes on as it would have after what all ranks saved is read, by these ranks and by a single device.

After the first step the ranks of the small model save a checkpoint as a run does, each its parts. It is read twice, and the last
step is trained from there. Its loss, and all weights and optimizer state behind it, are those of a run that went on: a moment
that is not restored changes no loss of this step, but every weight. Whole tensors are in a checkpoint, so a layout between these
two reads it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindllm.compiled.execute.cluster import ClusterStep
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.config import RunConfig
from mindllm.process.temporary import temporary_directory
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.checkpoint.parts import Part
from mindllm.verify.compare import cluster_parts, is_loss_problem
from mindllm.verify.side import Reference, build_cluster, compared, done_by
from mindllm.verify.single import SingleDevice, Task

SHOWN = 3  # differences of each side: where state is lost, every weight differs
Resumed = tuple[ClusterStep, Mapping[int, Mapping[str, Part]]]
"""A step behind a resume, and what each rank has then."""


def resume_problems(config: RunConfig, graphs: Sequence[CompiledGraph], reference: Reference) -> tuple[str, ...]:
    """Return how a step after a resume differs from that of a run that went on; nothing where it does not.

    Args:
        config: the small run.
        graphs: of all of its ranks.
        reference: a single device that has trained all steps; it is left behind the last one, resumed.

    Raises:
        UserError: the state cannot be saved or read.
    """
    return tuple(_problems(config, list(graphs), reference))


def _problems(config: RunConfig, graphs: list[CompiledGraph], reference: Reference) -> Iterator[str]:
    first, *others = reference.tasks
    trained = build_cluster(config, graphs, reference.given(0))
    done_by(trained, config, first)
    with temporary_directory("mindllm_resume_") as directory:
        path = CheckpointStore(Path(directory), keep_checkpoint_max=1).save(1, trained.local_state(), {"step": 1})
        del trained
        checkpoint = load_checkpoint(path)
        cluster = build_cluster(config, graphs, {**reference.frozen, **checkpoint.weights, **checkpoint.optimizer})
        resumed: dict[str, Resumed] = {"its own layout": (done_by(cluster, config, others[-1]), cluster_parts(cluster))}
        del cluster
        reference.device.engine.load(checkpoint)  # over the weights and the state of a later step
        resumed["a single device"] = _done_by_one(reference.device, others[-1])
    for who, (step, ranks) in resumed.items():
        comparison = compared(config, reference, len(others), step, ranks)
        problems = comparison.problems()
        if config.optimizer.block:  # a rounding in one step is another code of a moment, and another weight in the next
            problems = [problem for problem in problems if is_loss_problem(problem)]
        for problem in problems[:SHOWN]:
            yield f"resumed on {who}, the next step differs from one without the resume: {problem}"


def _done_by_one(device: SingleDevice, task: Task) -> Resumed:
    result = device.step(task)
    whole = {
        name: Part(array.shape, tuple(slice(0, size) for size in array.shape), array)
        for name, array in device.state().items()
    }
    step = ClusterStep(result.loss, (result.loss,), (result.global_norm,), (result.overflow,), (result.tokens,))
    return step, {0: whole}
