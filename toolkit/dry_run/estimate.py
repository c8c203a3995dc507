"""Where the dry run cannot run, for want of a C compiler: the memory of a rank estimated from its compiled graph alone."""

from __future__ import annotations

from mindllm.compiled.compile_rank import compile_rank
from mindllm.compiled.liveness import CONSTANT_VALUE, PARAMETER, Block, estimate
from mindllm.compiled.memory_tracker import category
from mindllm.compiled.own_stage import own_stage_only
from mindllm.compiled.simulate_rank import DEVICE_MEMORY, limit_of
from mindllm.compiled.simulation import Block as SimulatedBlock
from mindllm.compiled.simulation import Simulation
from mindllm.config import RunConfig
from mindllm.parallel.layout import Mesh

WEIGHT, KERNEL = "Weight", "Kernel"  # MindSpore's words
ALWAYS = (PARAMETER, CONSTANT_VALUE)


def estimate_rank(config: RunConfig, rank: int) -> Simulation:
    """As ``simulate_rank``, from the lives of the tensors of the compiled graph; gaps between blocks are not known."""
    sizes = config.parallel_config
    stage = Mesh(sizes.data_parallel, sizes.model_parallel, sizes.pipeline_stage).stage_of(rank)
    run, rename = own_stage_only(config, stage)
    found = estimate(compile_rank(run, rank))
    return Simulation(
        rank=rank,
        stage=stage,
        device_memory=DEVICE_MEMORY,
        limit=limit_of(config),
        used_peak=found.peak,
        actual_peak=found.peak,
        blocks=tuple(_block(block, rename(block.name)) for block in found.blocks),
        tasks=(),
        collectives=(),
    )


def _block(block: Block, name: str) -> SimulatedBlock:
    kind = WEIGHT if block.kind == PARAMETER else KERNEL
    return SimulatedBlock(
        start=block.start,
        end=None if block.kind in ALWAYS else block.end + 1,
        address=0,
        stream=0,
        size=block.size,
        kind=kind,
        node=name,
        users=(),
        category=category(kind, name, []),
    )
