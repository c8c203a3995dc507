"""``estimate_rank(config, rank)``: what ``simulate_rank`` tells, estimated from the compiled graph where nothing can simulate.

Needs neither Ascend software nor a C compiler. There are no addresses in it: gaps between blocks are not estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from mindllm.compiled.graph import cost
from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph
from mindllm.compiled.graph.liveness import CONSTANT_VALUE, OUTPUT, PARAMETER, Liveness, estimate
from mindllm.compiled.graph.unrolled import Memory, Unrolled
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.compiled.simulation.memory_tracker import category
from mindllm.compiled.simulation.simulate_rank import DEVICE_MEMORY
from mindllm.compiled.simulation.simulation import Block, Collective, Simulation, Task
from mindllm.config import RunConfig
from mindllm.parallel.layout import mesh_of
from mindllm.reduced_runs.stage import reduce_other_stages

LABEL = "estimated from the compiled graph: gaps between blocks, and kernels' workspace, are not in it"
KINDS = {PARAMETER: "Weight", CONSTANT_VALUE: "ConstantValue", OUTPUT: "Kernel"}


def estimate_rank(config: RunConfig, rank: int, timeout: float = 3600.0) -> Simulation:
    """Compiles global ``rank`` and estimates its memory; ``messages`` says that it is an estimate. Times count operations.

    Args:
        timeout: seconds.

    Raises:
        UserError: the rank does not exist.
        CompileFailed: the compiler's own error.
    """
    stage = mesh_of(config).stage_of(rank)
    smaller, rename = reduce_other_stages(config, stage)
    graph = compile_rank(smaller, rank, timeout)
    memory = estimate(graph)
    return Simulation(
        rank=rank,
        stage=stage,
        device_memory=DEVICE_MEMORY,
        limit=config.context.device_memory,
        used_peak=memory.peak,
        actual_peak=memory.peak,
        blocks=tuple(_blocks(memory, rename)),
        tasks=tuple(
            Task(time, rename(operation.node.scope), 0) for time, operation in enumerate(memory.step.operations)
        ),
        collectives=tuple(_collectives(graph, memory.step, rename)),
        messages=(LABEL,),
    )


def _blocks(memory: Liveness, rename: Callable[[str], str]) -> Iterator[Block]:
    users: defaultdict[Memory | None, list[int]] = defaultdict(list)
    for time, operation in enumerate(memory.step.operations):
        for read in dict.fromkeys(operation.reads):
            users[read].append(time)
    for block in memory.blocks:
        times = tuple(users[block.memory])
        names = [memory.step.operations[time].node.scope for time in times]
        kind, name = KINDS.get(block.kind, block.kind), rename(block.name)
        stays = block.kind in (PARAMETER, CONSTANT_VALUE)
        yield Block(
            start=block.start,
            end=None if stays else block.end + 1,
            address=0,
            stream=0,
            size=block.size,
            kind=kind,
            node=name,
            users=times,
            category=category(kind, name, names),
        )


def _collectives(graph: CompiledGraph, step: Unrolled, rename: Callable[[str], str]) -> Iterator[Collective]:
    """Positions count from 1, as those of the dry run."""
    for position, operation in enumerate(step.operations, start=1):
        node = operation.node
        if node.op not in COLLECTIVES:
            continue
        given = [read.tensor for read in operation.reads]
        tensor = (given or list(node.tensors))[0]
        peer = node.attributes.get("dst_global_rank", node.attributes.get("src_global_rank"))
        yield Collective(
            position=position,
            node=rename(node.scope),
            operator=node.op,
            group=str(node.attributes.get("group", "")),
            ranks=node.ranks,
            peer=peer,
            shape=str(tensor.shape),
            dtype=tensor.dtype,
            sent=0 if node.op == "Receive" else cost.bytes_of(given),
            received=0 if node.op == "Send" else cost.bytes_of(node.tensors),
        )
