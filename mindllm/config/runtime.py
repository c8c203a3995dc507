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
    train_steps: PositiveInt | None = Field(default=None, description="Optimizer steps of the run; wins over `epochs`.")
    stop_step: int = Field(
        default=0,
        ge=0,
        description="Training ends after this step while the schedule stays that of the whole run; 0: never.",
    )
    gradient_accumulation_steps: PositiveInt = Field(
        default=1,
        description="Forward and backward passes whose gradients are added before one optimizer step (no pipeline).",
    )
    step_timeout: int = Field(
        default=1800,
        ge=0,
        description="Seconds without a sign of life (a step, an evaluation, a checkpoint) after which the launcher takes a rank "
        "for hanging and ends the job; ten times as long until the first step, which compiles, is done; 0: never.",
    )
    slow_rank_factor: float = Field(
        default=1.5,
        gt=1.0,
        description="A rank whose own work in a step takes longer than the median of all ranks times this is named.",
    )


class ExportConfig(Section):
    """Section ``export_hf``."""

    directory: str = Field(
        default="", description="Directory that is written after the last step; empty: none. It must not exist before."
    )
    dtype: DType | None = Field(default=None, description="Type of the written weights; null: `param_init_type`.")
    max_shard_size: str = Field(
        default="5GB", pattern=SIZE_PATTERN, description="Largest file of weights, as `5GB` or `200MB`."
    )


class JitConfig(Section):
    """Section ``context.jit_config``."""

    jit_level: Literal["O0", "O1", "O2"] = Field(default="O0", description="Optimisation level of the graph compiler.")


def bytes_of(size: str) -> int:
    """Bytes of ``58GB`` as MindSpore counts them, a GB as 2**30; ValueError where it is no such size."""
    if not re.fullmatch(DEVICE_MEMORY_PATTERN, size):
        raise ValueError(f"{size} is no size such as 58GB")
    return int(float(size.removesuffix("GB")) * (1 << 30))


class ContextConfig(Section):
    """Section ``context``: what is handed to MindSpore's context."""

    mode: Literal[0] = Field(default=0, description="0: graph mode, the only one.")
    device_target: Literal["CPU", "Ascend"] = Field(default="CPU", description="Device that executes the graph.")
    device_id: int = Field(default=0, ge=0, description="Device of this process.")
    max_device_memory: str = Field(
        default="58GB",
        pattern=DEVICE_MEMORY_PATTERN,
        description="Largest device memory MindSpore may take, as `58GB`.",
    )
    lockstep_step_seconds: PositiveInt = Field(
        default=300,
        description="Several devices with `device_target: CPU` and no launcher are executed together in one process; a run "
        "whose step is estimated to take longer than these seconds is refused.",
    )
    max_call_depth: PositiveInt = Field(default=10000, description="Largest depth of graph calls while compiling.")
    save_graphs: bool | Literal[0, 1, 2, 3] = Field(
        default=False,
        description="Writes the graph after each pass of the compiler as text (.ir); 1, 2, 3: its levels of detail, true is 1. "
        "Switches the compile cache off. `mindllm inspect` reads the file named `…_validate_….ir`.",
    )
    save_graphs_path: str = Field(
        default="./graph",
        description="Directory of the graphs; with several devices each rank writes into its own `rank_N`.",
    )
    memory_optimize_level: Literal["O0", "O1"] = Field(default="O0", description="Memory reuse of the graph compiler.")
    jit_config: JitConfig = Field(default_factory=JitConfig, description="Settings of the graph compiler.")
    enable_graph_kernel: bool | Literal["auto"] = Field(
        default="auto",
        description="Graph-kernel fusion; auto: on where what it needs is installed, but not in predict.",
    )
    compile_cache: bool = Field(
        default=True,
        description="Keeps compiled graphs, or with graph-kernel fusion its kernels, so that the next start is quick.",
    )
    compile_cache_path: str = Field(
        default="", description="Directory of the compile cache; empty: `{output_dir}/compile_cache`."
    )
    runtime_num_threads: PositiveInt | None = Field(
        default=None, description="Threads of the CPU runtime; null: MindSpore's choice."
    )

    @property
    def device_memory(self) -> int:
        """Bytes of ``max_device_memory``."""
        return bytes_of(self.max_device_memory)
