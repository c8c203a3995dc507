"""Sections about distribution: ``parallel`` (MindSpore's parallel context) and ``parallel_config`` (sizes of the mesh)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mindllm.architecture.layer_counts import ZERO_BUBBLE_V
from mindllm.axes import MeshSizes
from mindllm.config.section import List, PositiveInt, Section

PARALLEL_MODES = {"data_parallel": 0, "semi_auto_parallel": 1}
WrittenMode = Literal[0, 1, "data_parallel", "semi_auto_parallel", "DATA_PARALLEL", "SEMI_AUTO_PARALLEL"]
GATHER, ULYSSES, RING = "colossalai_cp", "ulysses_cp", "ring_cp"
FOREIGN_CONTEXT_ALGORITHMS = {
    "hybrid_cp": "context_parallel is one axis of devices, not two; write ulysses_cp while heads divide, else colossalai_cp",
}
"""Ways of MindFormers and others to share a sequence that mindllm does not have."""


def _parallel_mode(value: Any) -> Any:
    return PARALLEL_MODES.get(value.lower(), value) if isinstance(value, str) else value


def _context_algorithm(value: Any) -> Any:
    if isinstance(value, str) and value in FOREIGN_CONTEXT_ALGORITHMS:
        raise ValueError(f"{value} is not available: {FOREIGN_CONTEXT_ALGORITHMS[value]}")
    return value


class ParallelOptimizerConfig(Section):
    """Section ``parallel.parallel_optimizer_config``."""

    gradient_accumulation_shard: bool = Field(
        default=False, description="Keeps accumulated gradients sharded over the data-parallel ranks."
    )
    parallel_optimizer_threshold: int = Field(
        default=64,
        ge=0,
        description="Parameters below this size (KB, before tensor parallelism) are not sharded.",
    )
    optimizer_weight_shard_size: int = Field(
        default=-1, ge=-1, description="Ranks that share one copy of the optimizer state; -1: all data-parallel ranks."
    )


class PipelineConfig(Section):
    """Section ``parallel.pipeline_config``."""

    pipeline_interleave: bool = Field(
        default=False, description="Several chunks of layers per stage (`model.model_config.pp_interleave_num`)."
    )
    pipeline_scheduler: Literal["1f1b", "gpipe", "zero_bubble_v", "seqpipe", "seqvpp", "seqsmartvpp"] = Field(
        default="1f1b",
        description="Order of the micro batches. `zero_bubble_v`: two chunks per stage, the second in reverse order of "
        "stages. `seqpipe`, `seqvpp`, `seqsmartvpp`: 1F1B over sequence pieces; with several chunks the last "
        "has fewer micro batches in flight.",
    )

    @property
    def v_shape(self) -> bool:
        """Return True if the second chunk runs through the stages in reverse, so that the model ends on stage 0."""
        return self.pipeline_scheduler == ZERO_BUBBLE_V


class ParallelContextConfig(Section):
    """Section ``parallel``."""

    parallel_mode: Annotated[Literal[0, 1], BeforeValidator(_parallel_mode, json_schema_input_type=WrittenMode)] = (
        Field(
            default=1,
            description="0 or `data_parallel`; 1 or `semi_auto_parallel` (operators are sharded as mindllm declares).",
        )
    )
    full_batch: bool = Field(
        default=True, description="Every rank reads the complete global batch and slices it in the graph."
    )
    dataset_strategy: List[List[PositiveInt]] | None = Field(
        default=None, description="Slices per dimension of each input column; only with `full_batch: false`."
    )
    gradients_mean: bool = Field(
        default=False, description="Averages gradients over data-parallel ranks; false: sums them."
    )
    enable_parallel_optimizer: bool = Field(
        default=False, description="Shards optimizer state over the data-parallel ranks."
    )
    parallel_optimizer_config: ParallelOptimizerConfig = Field(
        default_factory=ParallelOptimizerConfig, description="Settings of the sharded optimizer."
    )
    pipeline_config: PipelineConfig = Field(default_factory=PipelineConfig, description="Settings of the pipeline.")
    strategy_ckpt_save_file: str = Field(
        default="", description="File for MindSpore's parameter layouts; empty: not written."
    )


class ParallelConfig(MeshSizes, Section):
    """Section ``parallel_config``: sizes of the device mesh."""

    data_parallel: PositiveInt = Field(default=1, description="Model replicas, each with a part of the batch.")
    model_parallel: PositiveInt = Field(
        default=1, description="Ranks that share each layer's weights (tensor parallel)."
    )
    context_parallel: PositiveInt = Field(default=1, description="Ranks that share each sequence (context parallel).")
    context_parallel_algo: Annotated[
        Literal["colossalai_cp", "ulysses_cp", "ring_cp"], BeforeValidator(_context_algorithm)
    ] = Field(
        default="colossalai_cp",
        description="Communication of attention over `context_parallel`: `colossalai_cp` gathers keys and values for the "
        "queries of each rank; `ulysses_cp` exchanges sequence parts for heads; `ring_cp` passes keys and "
        "values around the ranks.",
    )
    context_parallel_balanced: bool = Field(
        default=False,
        description="Each rank has one piece from the beginning and one from the end of a sequence, so that all ranks "
        "compute the same share of the causal triangle (`colossalai_cp`, fused attention).",
    )
    pipeline_stage: PositiveInt = Field(default=1, description="Pipeline stages.")
    expert_parallel: PositiveInt = Field(
        default=1, description="Groups of devices of a stage that share the experts (expert parallel)."
    )
    expert_model_parallel: PositiveInt | None = Field(
        default=None, description="Ranks that share the weights of one expert; null: `model_parallel`."
    )
    micro_batch_num: PositiveInt = Field(default=1, description="Micro batches per step in a pipeline.")
    seq_split_num: PositiveInt = Field(
        default=1,
        description="Pieces of each sequence that pass through the pipeline one after another (`seqpipe`, `seqvpp`, "
        "`seqsmartvpp`).",
    )
    use_seq_parallel: bool = Field(
        default=False, description="Shards norms and residuals along the sequence over the tensor-parallel ranks."
    )
    vocab_emb_dp: bool = Field(
        default=True,
        description="Keeps the complete embedding table on every rank; false: its rows are sharded over tensor-parallel "
        "ranks.",
    )
    gradient_aggregation_group: PositiveInt = Field(
        default=4, description="Groups of layers with fused gradient communication (without pipeline)."
    )

    @property
    def exchanges_heads(self) -> bool:
        """Return True if context-parallel ranks exchange sequence parts for heads."""
        return self.shares_sequences and self.context_parallel_algo == ULYSSES

    @property
    def passes_keys(self) -> bool:
        """Return True if keys and values are passed around the context-parallel ranks."""
        return self.shares_sequences and self.context_parallel_algo == RING
