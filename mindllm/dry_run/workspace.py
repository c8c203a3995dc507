"""An estimate of what kernels need beside their inputs and outputs, which the dry run's level 1 leaves out.

Kernels of the matrix unit of an Ascend 910B (24 cube cores, 48 vector cores) take

- a system workspace each, 16 MiB (what ``GetLibApiWorkSpaceSize`` of Ascend C answers);
- FlashAttentionScore in addition a tile of scores and one of results per vector core, some 24 MiB whatever the sequence;
- FlashAttentionScoreGrad in addition the gradients of query, key and value in fp32, where it adds them up before it casts them.

So do the tiling functions in the published sources of CANN's transformer operators. Not known, and left out: copies that a matrix
product makes of operands whose shape is not a multiple of its tile, buffers of HCCL (outside the pool), and workspaces of all
other kernels, which are small. A workspace lives as long as its kernel runs, so only the largest sum of memory in use and
workspace counts.
"""

from __future__ import annotations

from collections import defaultdict

from mindllm.axes import CONTEXT
from mindllm.compiled.simulation.simulation import Simulation
from mindllm.config import RunConfig
from mindllm.dry_run.moments import Moments, bytes_of
from mindllm.units import MIB

HALF, GRADIENTS = 2, 3  # bytes of an element; of query, key and value
SYSTEM, TILES, FP32 = 16 * MIB, 24 * MIB, 4
ATTENTION, ATTENTION_GRADIENT = "FlashAttentionScore", "FlashAttentionScoreGrad"
MATRIX = frozenset({"MatMul", "BatchMatMul", "MatMulV2", "GroupedMatmul"})


def peak_with_workspace(moments: Moments, attention_elements: int) -> int:
    """The largest sum, in bytes, of memory in use and of the workspace of the kernel that has just been given its outputs.

    Args:
        attention_elements: of query, key and value together, of a micro-batch on one rank.
    """
    return max(
        bytes_of(fill) + workspace(kind.rpartition("/")[2], attention_elements) for kind, fill in moments.items()
    )


def workspace(operator: str, attention_elements: int) -> int:
    """Bytes of workspace of one kernel of a kind."""
    if operator == ATTENTION:
        return SYSTEM + TILES
    if operator == ATTENTION_GRADIENT:
        return SYSTEM + TILES + FP32 * attention_elements
    return SYSTEM if operator in MATRIX else 0


def attention_elements_of(config: RunConfig) -> int:
    """Elements of query, key and value of a micro-batch on one rank of a run: of the largest call, where there are two."""
    model, sizes = config.model.config, config.parallel_config
    of_queries = sizes.size(CONTEXT) * (2 if sizes.context_parallel_balanced else 1)
    of_keys = of_queries if sizes.passes_keys else sizes.size(CONTEXT) if sizes.exchanges_heads else 1
    heads = model.num_heads / of_queries + 2 * model.n_kv_heads / of_keys
    whole = config.runner_config.batch_size * model.seq_length * model.head_dim
    return round(whole * heads / sizes.model_parallel)


def attention_elements_in(simulation: Simulation) -> int:
    """The same from the largest gradients that a kernel wrote, which are of 16 bits."""
    written: dict[str, list[int]] = defaultdict(list)
    for block in simulation.blocks:
        if block.operator == ATTENTION_GRADIENT:
            written[block.node].append(block.size)
    return max((sum(sorted(sizes)[-GRADIENTS:]) for sizes in written.values()), default=0) // HALF
