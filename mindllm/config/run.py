"""``RunConfig``: one run, read from one YAML. Whoever holds it reads no YAML again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from mindllm.config.callbacks import DEFAULT_CALLBACKS, Callback, MonitorConfig
from mindllm.config.dataset import EvalDatasetConfig, PreferenceDataLoader, ProcessorConfig, TrainDatasetConfig
from mindllm.config.generation import EvaluationConfig, GenerationConfig
from mindllm.config.model import ModelSection
from mindllm.config.optimizer import GroupedLrSchedule, LrSchedule, OptimizerConfig, RunnerWrapperConfig
from mindllm.config.parallel import ParallelConfig, ParallelContextConfig
from mindllm.config.reading.document import KeyPath, Origin, Problem, child, closest_origin
from mindllm.config.recompute import RecomputeConfig, SwapConfig
from mindllm.config.runtime import ContextConfig, ExportConfig, RunnerConfig, TrainerConfig
from mindllm.config.section import List, PositiveInt, Section
from mindllm.config.tuning import PreferenceConfig
from mindllm.errors import UserError


@dataclass(frozen=True)
class Provenance:
    """Where a configuration was read from. Two configurations are equal whatever their provenance.

    ``ignored``: unknown keys of its file were left out.
    """

    source: Path | None = field(default=None, compare=False)
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict, compare=False)
    theirs: Mapping[str, Any] | None = field(default=None, compare=False)
    ignored: bool = field(default=False, compare=False)


class RunConfig(Section):
    """The whole YAML."""

    seed: int = Field(default=42, ge=0, description="Seed of initial weights, data order and sampling.")
    output_dir: str = Field(default="./output", description="Directory of logs, checkpoints and metrics.")
    run_mode: Literal["train", "finetune", "eval", "predict", "chat"] = Field(
        default="train",
        description="train: from new weights, or those of `load_checkpoint`; finetune: from `load_checkpoint`, which it needs. "
        "Optimizer and step count start afresh in both",
    )
    load_checkpoint: str = Field(
        default="",
        description="Checkpoint to load weights from; weights of MindFormers (a file, or the directory above `rank_0`); "
        "or a Hugging Face directory, which also supplies the tokenizer and omitted keys of "
        "`model.model_config`.",
    )
    load_adapter: str = Field(
        default="",
        description="Adapter for the weights of `load_checkpoint`: a PEFT directory, a checkpoint, or a directory of "
        "several adapters.",
    )
    adapter_id: str = Field(default="", description="Name of the adapter in `load_adapter`, if it has several.")
    pretrained_model_dir: str = Field(
        default="",
        description="Hugging Face directory that supplies the tokenizer and omitted keys of `model.model_config`, but no "
        "weights.",
    )
    resume_training: bool | str = Field(
        default=False,
        description="Continues a run. true: from the newest good checkpoint in `output_dir`; auto: the same, and from the "
        "beginning where there is none; or a checkpoint directory",
    )
    overwrite: bool = Field(
        default=False,
        description="Starts a new run if `output_dir` has one: its metrics are deleted, its checkpoints replaced.",
    )
    require_proof: bool = Field(
        default=False,
        description="Requires a complete proof of this configuration with the verdict ready (`mindllm prove`) before "
        "training.",
    )
    use_parallel: bool = Field(
        default=False, description="Runs on several devices: the product of the sizes of `parallel_config`."
    )
    micro_batch_interleave_num: PositiveInt = Field(
        default=1,
        description="Copies of the model's operators in the graph, each for a part of the batch: the computation of one "
        "overlaps the tensor-parallel communication of another. Divides `runner_config.batch_size`; 1: no "
        "copies.",
    )
    train_precision_sync: bool = Field(default=False, description="Deterministic kernels.")
    do_eval: bool = Field(default=False, description="Evaluates during training.")
    eval_step_interval: PositiveInt = Field(default=100, description="Steps between two evaluations.")
    profile: bool = Field(default=False, description="Records a profile of some steps.")
    profile_start_step: PositiveInt = Field(default=1, description="First step of the profile.")
    profile_stop_step: PositiveInt = Field(default=10, description="Last step of the profile.")
    profile_memory: bool = Field(default=False, description="Records memory in the profile.")
    with_stack: bool = Field(default=False, description="Records Python call stacks in the profile.")
    profile_rank_ids: List[int] | None = Field(default=None, description="Ranks to profile; null: all.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Kind of training.")
    runner_config: RunnerConfig = Field(default_factory=RunnerConfig, description="Batch size and length of the run.")
    context: ContextConfig = Field(default_factory=ContextConfig, description="Device and graph compiler.")
    parallel: ParallelContextConfig = Field(
        default_factory=ParallelContextConfig, description="Parallel mode and its settings."
    )
    parallel_config: ParallelConfig = Field(default_factory=ParallelConfig, description="Sizes of the device mesh.")
    recompute_config: RecomputeConfig = Field(
        default_factory=RecomputeConfig, description="Activations that the backward pass recomputes."
    )
    swap_config: SwapConfig = Field(default_factory=SwapConfig, description="Activations in host memory.")
    model: ModelSection = Field(description="The network.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer.")
    lr_schedule: LrSchedule | None = Field(
        default=None, description="Learning rate schedule; its keys depend on `type`. Required for training."
    )
    grouped_lr_schedule: GroupedLrSchedule = Field(
        default_factory=GroupedLrSchedule, description="Learning rates of groups of weights."
    )
    runner_wrapper: RunnerWrapperConfig = Field(
        default_factory=RunnerWrapperConfig, description="Loss scale and gradient clipping."
    )
    train_dataset: TrainDatasetConfig = Field(default_factory=TrainDatasetConfig, description="Training data.")
    preference: PreferenceConfig = Field(
        default_factory=PreferenceConfig, description="Preference loss (`type: PreferenceDataLoader`)."
    )
    eval_dataset: EvalDatasetConfig = Field(default_factory=EvalDatasetConfig, description="Held-out data.")
    eval_tasks: List[str] = Field(
        default=(),
        description="`run_mode: eval`: public tasks, by their names in lm-evaluation-harness; empty: the loss on "
        "held-out data.",
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation on tasks.")
    processor: ProcessorConfig = Field(default_factory=ProcessorConfig, description="Tokenizer.")
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="Text generation.")
    input_data: str | List[str] | None = Field(
        default=None,
        description="`run_mode: predict`: a prompt, a list of prompts, a text file with one prompt per line, or a "
        "`.jsonl` file.",
    )
    predict_batch_size: PositiveInt = Field(default=8, description="Prompts per batch.")
    save_file: str = Field(
        default="", description="JSON Lines file for the results of `run_mode: predict`; empty: standard output."
    )
    export_hf: ExportConfig = Field(
        default_factory=ExportConfig, description="Export of the trained weights as a Hugging Face directory."
    )
    monitor_config: MonitorConfig = Field(
        default_factory=MonitorConfig, description="Health figures of a step, by group of layers."
    )
    callbacks: List[Callback] = Field(default=DEFAULT_CALLBACKS, description="Callbacks of the training loop.")

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @property
    def source(self) -> Path | None:
        """Return the file this configuration was read from."""
        return self._provenance.source

    @property
    def has_ignored_keys(self) -> bool:
        """Return True if unknown keys of the file were ignored."""
        return self._provenance.ignored

    @property
    def mindformers_keys(self) -> Mapping[str, Any] | None:
        """Return the dotted keys and values of the YAML of MindFormers that was read; None for other YAMLs."""
        return self._provenance.theirs

    @property
    def sends_tokens(self) -> bool:
        """Return True if expert-parallel ranks send each other sorted tokens, in numbers that the router decides."""
        model, shared = self.model.config, self.parallel_config.expert_parallel > 1
        return shared and model.moe_grouped_gemm and model.moe_token_dispatcher_type == "alltoall"

    @property
    def chat_template(self) -> str:
        """Return the file of the chat template; empty for the template of the tokenizer."""
        return getattr(self.train_dataset.data_loader.config, "chat_template", "")

    @property
    def is_preference_tuning(self) -> bool:
        """Return True if the run learns from preferred and rejected answers."""
        return isinstance(self.train_dataset.data_loader, PreferenceDataLoader)

    @property
    def uses_position_ids(self) -> bool:
        """Return True if positions and masks are columns of the batch.

        This is the case if rows have several documents, or if ranks share sequences in a pipeline: MindSpore 2.10 does not slice
        tables of positions there.
        """
        sizes = self.parallel_config
        shared = sizes.shares_sequences and sizes.pipeline_stage > 1
        return shared or bool(self.train_dataset.document_columns)

    @property
    def has_row_masks(self) -> bool:
        """Return True if each row of a batch has its own mask, which ring attention does not support."""
        return self.uses_position_ids and not self.parallel_config.passes_keys

    @property
    def last_stage(self) -> int:
        """Return the stage with the last layer, the head and the loss: stage 0 for V-shaped chunks."""
        return 0 if self.parallel.pipeline_config.v_shape else self.parallel_config.pipeline_stage - 1

    @property
    def global_batch_size(self) -> int:
        """Return the samples per optimizer step over all ranks, micro batches and accumulation steps."""
        per_replica = self.runner_config.batch_size * self.runner_config.gradient_accumulation_steps
        return per_replica * self.parallel_config.data_parallel * self.parallel_config.micro_batch_num

    def flops_per_token(self) -> float:
        """Return the model FLOPs of a step per token, for preference tuning with the forward pass of the reference."""
        model, compared = self.model.config, self.is_preference_tuning and self.preference.has_reference
        return model.flops_per_token() + (model.base.flops_per_token() / 3 if compared else 0.0)

    @property
    def about_mode(self) -> str:
        """Return a line on what the figures of a training step mean if ``run_mode`` does not train; empty if it trains."""
        trains = self.run_mode in ("train", "finetune")
        return (
            "" if trains else f"run_mode {self.run_mode} trains nothing: this is the step that would train its network"
        )

    @property
    def about_parameters(self) -> str:
        """Return a line on parameters in half precision; empty for float32."""
        model, has_copies = self.model.config, self.optimizer.master_weights
        if not model.has_half_parameters:
            return ""
        updates = (
            "updated as float32 copies, then rounded"
            if has_copies
            else "updated in float32 and rounded, no float32 copy"
        )
        return f"parameters in {model.param_init_type}, {updates}"

    @property
    def compile_cache_directory(self) -> Path:
        """Return the directory of the compile cache."""
        return Path(self.context.compile_cache_path or Path(self.output_dir) / "compile_cache")

    def error(self, key: str, message: str) -> UserError:
        """Return the error of a dotted ``key`` that was detected after loading, with the place of the key."""
        path: KeyPath = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        return UserError.of(self.problem(path, message))

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return ``message`` about the value at ``path`` with the place of the value."""
        origin = closest_origin(self._provenance.origins, path, self._provenance.source)
        return Problem(origin, path, message, self.value_at(path))

    def value_at(self, path: KeyPath) -> Any:
        """Return the value of a key by its YAML names, or ``None``."""
        node: Any = self
        for key in path:
            if isinstance(node, Section):
                names = {field.alias or name: name for name, field in type(node).model_fields.items()}
                node = getattr(node, names.get(str(key), ""), None)
            else:
                node = child(node, key)
        return node.model_dump(by_alias=True, exclude_unset=True, warnings=False) if isinstance(node, Section) else node

    def given(self) -> dict[str, Any]:
        """Return the keys that were set, as a tree of YAML names, without defaults."""
        return self.model_dump(by_alias=True, exclude_unset=True)
