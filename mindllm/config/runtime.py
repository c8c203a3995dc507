"""Sections about the run itself: trainer, step counts, and the MindSpore context."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from mindllm.config.section import DType, PositiveInt, Section
from mindllm.files import SIZE_PATTERN

DEVICE_MEMORY_PATTERN = r"^\d+(\.\d+)?GB$"


class TrainerConfig(Section):
    """Section ``trainer``."""

    type: Literal["CausalLanguageModelingTrainer"] = Field(
        default="CausalLanguageModelingTrainer", description="Kind of training: next-token prediction."
    )
    model_name: str = Field(default="", description="Name shown in logs and reports.")


class RunnerConfig(Section):
    """Section ``runner_config``."""

    batch_size: PositiveInt = Field(
        default=1,
        description="Samples per data-parallel replica and micro batch (or accumulation step). The only batch size",
    )
    epochs: PositiveInt = Field(
        default=1, description="Passes over the training split; used when `train_steps` is not given."
    )
    train_steps: PositiveInt | None = Field(default=None, description="Optimizer steps of the run; overrides `epochs`.")
    stop_step: int = Field(
        default=0,
        ge=0,
        description="Training ends after this step, without a change of the schedule; 0: not set.",
    )
    gradient_accumulation_steps: PositiveInt = Field(
        default=1,
        description="Forward and backward passes whose gradients are accumulated before an optimizer step (no pipeline).",
    )
    step_timeout: int = Field(
        default=1800,
        ge=0,
        description="Seconds without a heartbeat (a step, an evaluation, a checkpoint) after which the launcher "
        "considers a rank hung and ends the job; ten times as long before the end of the first step, which "
        "compiles; 0: never.",
    )
    slow_rank_factor: float = Field(
        default=1.5,
        gt=1.0,
        description="A rank is reported as slow if its own time per step exceeds the median of all ranks times this "
        "factor.",
    )


class ExportConfig(Section):
    """Section ``export_hf``."""

    directory: str = Field(
        default="", description="Directory to write after the last step; empty: no export. It must not exist yet."
    )
    dtype: DType | None = Field(default=None, description="Type of the exported weights; null: `param_init_type`.")
    max_shard_size: str = Field(
        default="5GB", pattern=SIZE_PATTERN, description="Maximum size of a weight file, such as `5GB` or `200MB`."
    )


class JitConfig(Section):
    """Section ``context.jit_config``."""

    jit_level: Literal["O0", "O1", "O2"] = Field(default="O0", description="Optimization level of the graph compiler.")


def bytes_of(size: str) -> int:
    """Return the bytes of a size such as ``58GB``, where GB is 2**30 as in MindSpore."""
    if not re.fullmatch(DEVICE_MEMORY_PATTERN, size):
        raise ValueError(f"invalid memory size '{size}' (example: 58GB)")
    return int(float(size.removesuffix("GB")) * (1 << 30))


class ContextConfig(Section):
    """Section ``context``: settings of MindSpore's context."""

    mode: Literal[0] = Field(default=0, description="0: graph mode, the only one.")
    device_target: Literal["CPU", "Ascend"] = Field(default="CPU", description="Device that executes the graph.")
    device_id: int = Field(default=0, ge=0, description="Device of this process.")
    max_device_memory: str = Field(
        default="58GB",
        pattern=DEVICE_MEMORY_PATTERN,
        description="Maximum device memory of MindSpore, such as `58GB`.",
    )
    lockstep_step_seconds: PositiveInt = Field(
        default=300,
        description="With several devices, `device_target: CPU` and no launcher, one process executes all ranks. A run "
        "whose estimated step time exceeds this number of seconds is refused.",
    )
    max_call_depth: PositiveInt = Field(default=10000, description="Maximum depth of graph calls in the compiler.")
    save_graphs: bool | Literal[0, 1, 2, 3] = Field(
        default=False,
        description="Writes the graph after each compiler pass as text (.ir); 1, 2, 3: levels of detail, true is 1. "
        "Disables the compile cache. `mindllm inspect` reads the file named `…_validate_….ir`.",
    )
    save_graphs_path: str = Field(
        default="./graph",
        description="Directory of the graphs; with several devices each rank writes to its own `rank_N`.",
    )
    memory_optimize_level: Literal["O0", "O1"] = Field(default="O0", description="Memory reuse of the graph compiler.")
    jit_config: JitConfig = Field(default_factory=JitConfig, description="Settings of the graph compiler.")
    enable_graph_kernel: bool | Literal["auto"] = Field(
        default="auto",
        description="Graph-kernel fusion; auto: on if its requirements are installed, except for predict.",
    )
    compile_cache: bool = Field(
        default=True,
        description="Caches compiled graphs, or the kernels of graph-kernel fusion, to speed up the next start.",
    )
    compile_cache_path: str = Field(
        default="", description="Directory of the compile cache; empty: `{output_dir}/compile_cache`."
    )
    runtime_num_threads: PositiveInt | None = Field(
        default=None, description="Threads of the CPU runtime; null: default of MindSpore."
    )

    @property
    def device_memory(self) -> int:
        """Return ``max_device_memory`` in bytes."""
        return bytes_of(self.max_device_memory)
