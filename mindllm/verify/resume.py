"""Whether training goes on as it would have after what all ranks saved is read, by these ranks and by a single device.

After the first step the ranks of the small model save a checkpoint as a run does, each its parts. It is read twice, and the last
step is trained from there. Whole tensors are in it, so a layout between these two reads it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.config import RunConfig
from mindllm.process.temporary import temporary_directory
from mindllm.reduced_runs.model import single_device
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.verify.compare import TOLERANCES
from mindllm.verify.side import Reference, build_cluster
from mindllm.verify.single import SingleDevice


def resume_problems(config: RunConfig, graphs: Sequence[CompiledGraph], reference: Reference) -> tuple[str, ...]:
    """Return how steps after a resume differ from those of a run that went on; nothing where they do not.

    Args:
        config: the small run.
        graphs: of all of its ranks.
        reference: a single device that has trained all steps.

    Raises:
        UserError: the state cannot be saved or read.
    """
    return tuple(_problems(config, list(graphs), reference))


def _problems(config: RunConfig, graphs: list[CompiledGraph], reference: Reference) -> Iterator[str]:
    first, *_, last = reference.tasks
    wanted = reference.results[-1].loss
    trained = build_cluster(config, graphs, reference.initial)
    trained.step(first.batch, first.rate, first.scale, group_rates=first.group_rates)
    with temporary_directory("mindllm_resume_") as directory:
        path = CheckpointStore(Path(directory), keep_checkpoint_max=1).save(1, trained.local_state(), {"step": 1})
        del trained
        checkpoint = load_checkpoint(path)
        resumed = build_cluster(config, graphs, {**checkpoint.weights, **checkpoint.optimizer})
        done = resumed.step(last.batch, last.rate, last.scale, group_rates=last.group_rates)
        losses = {"its own layout": done.loss}
        del resumed
        device = SingleDevice(single_device(config))
        device.engine.load(checkpoint)
        losses["a single device"] = device.step(last).loss
    most = TOLERANCES[config.model.config.compute_dtype].loss
    for who, loss in losses.items():
        if not abs(loss - wanted) <= most * max(1.0, abs(wanted)):
            yield f"resumed on {who}, the next loss is {loss:.6f}; without the resume it is {wanted:.6f}"
