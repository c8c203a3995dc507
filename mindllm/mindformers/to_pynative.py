"""A run of ours in the PyNative form of MindFormers 2.x, so that what was proved on the static graph can move.

What is written is read back by the reader of that form (``pynative.py``) and held against the run: a key that came back otherwise
is told where only memory, speed or watching follow from it, and refused where it changes what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from mindllm.config.reading.document import Document, leaves
from mindllm.config.reading.load import build_config, tree_of
from mindllm.config.run import RunConfig
from mindllm.errors import UserError
from mindllm.families.family import RUN_KEYS
from mindllm.families.hugging_face import config_json
from mindllm.mindformers.pynative import METHODS
from mindllm.mindformers.reader import convert
from mindllm.mindformers.reading import shown

NETWORKS = ("deepseek_v3", "qwen3")  # that MindFormers' pages name for this trainer
SECTION = "model.model_config"
MODEL = {  # key of MindFormers: key of mindllm, in addition to config.json
    "seq_length": "seq_length",
    "compute_dtype": "compute_dtype",
    "params_dtype": "param_init_type",
    "layernorm_compute_dtype": "layernorm_compute_type",
    "softmax_compute_dtype": "softmax_compute_type",
    "rotary_dtype": "rotary_dtype",
    "hidden_dropout": "hidden_dropout",
}
UNREAD = (
    *("attention_bias", "mlp_bias", "topk_method", "moe_layer_freq", "rope_interleave", "rope_scaling", "use_cache"),
    *("torch_dtype", "use_sliding_window", "sliding_window"),
)
"""Names of ``config.json`` that MindFormers has not; what they say comes back from other keys, or the run is refused."""
LOSSES = {"expert": "seq_aux_loss", "global": "global_aux_loss"}
YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
TOLD = {  # prefixes of keys without effect on the result, and a remark
    "recompute_config": "recomputation of parts of a layer is not carried over: names of modules differ; it takes more memory",
    "swap_config": "activations are not offloaded there: names of modules differ; it takes more memory",
    "parallel_config.use_seq_parallel": "there sequences are always shared where tensors are",
    "parallel_config.vocab_emb_dp": "there ranks always split the table of tokens",
    "parallel.parallel_optimizer_config": "there weights, gradients and optimizer state are shared in one way",
    "parallel_config.gradient_aggregation_group": "how gradients are put together before they are exchanged",
    "parallel.dataset_strategy": "a batch is split over the replicas",
    "parallel.strategy_ckpt_save_file": "no strategy files there",
    "micro_batch_interleave_num": "samples are one copy there: communication does not overlap",
    f"{SECTION}.loss_chunks": "the logits of a sequence are whole there; they take more memory",
    f"{SECTION}.fine_grain_interleave": "it only hides exchanges",
    f"{SECTION}.moe_token_dispatcher_type": "there sorted tokens are always sent to the ranks of their experts",
}
NOT_CARRIED = (  # keys of a run of mindllm that do not affect the result
    "output_dir", "trainer", "callbacks", "context", "do_eval", "eval_", "evaluation", "processor", "generation", "input_data",
    "predict_batch_size", "save_file", "export_hf", "monitor_config", "require_proof", "overwrite", "profile", "with_stack",
    "runner_config.epochs", "runner_config.stop_step", "runner_config.step_timeout", "runner_config.slow_rank_factor",
    "run_mode", "load_adapter",  "adapter_id", "lr_schedule.total_steps",
    f"{SECTION}.use_flash_attention", f"{SECTION}.bos_", f"{SECTION}.eos_", f"{SECTION}.pad_",
)  # fmt: skip


class PlacedLayer(Protocol):
    """A layer's place in the pipeline, and whether all of it is recomputed."""

    @property
    def stage(self) -> int: ...

    @property
    def chunk(self) -> int: ...

    @property
    def recompute(self) -> bool: ...


@dataclass(frozen=True)
class Written:
    """A run in the PyNative form.

    Attributes:
        tree: the YAML.
        told: keys that are not carried over, with a remark. None of them changes the result.
    """

    tree: dict[str, Any]
    told: dict[str, str]


def write_pynative(config: RunConfig, layers: Sequence[PlacedLayer]) -> Written:
    """Return ``config`` in the PyNative form; ``layers`` are those of the complete model, in order.

    Raises:
        UserError: a key that changes the result has no form there.
    """
    model = config.model.config
    kind = config.train_dataset.data_loader.type
    if model.model_type not in NETWORKS:
        raise config.error(f"{SECTION}.model_type", f"the PyNative trainer is known to have {', '.join(NETWORKS)}")
    if model.pet_config is not None:
        raise config.error(
            f"{SECTION}.pet_config", "the PyNative trainer is not known to have adapters; merge them first"
        )
    if kind != "BlendedMegatronDatasetDataLoader":
        message = "moves with a corpus of BlendedMegatronDatasetDataLoader alone; mindllm data preprocess makes one"
        raise config.error("train_dataset.data_loader.type", message)
    if config.runner_config.train_steps is None:
        raise config.error("runner_config.train_steps", "how many steps? there they are written; give N")
    if config.optimizer.type not in ("AdamW", "Muon"):
        raise config.error("optimizer.type", "the PyNative trainer is known to have AdamW and Muon")
    tree = {
        "checkpoint": _checkpoint(config),
        "training": _training(config),
        "optimizer": _optimizer(config),
        "lr_scheduler": _schedule(config),
        "parallelism": _parallelism(config, layers),
        "recompute": _recompute(layers[: config.model.config.num_layers]),
        "context": {"mode": 1, "device_target": "Ascend", "max_device_memory": config.context.max_device_memory},
        "train_dataset": _data(config),
        "model": _model(config),
    }
    return Written(tree, dict(_differences(config, tree)))


def _checkpoint(config: RunConfig) -> dict[str, Any]:
    saved = next((callback for callback in config.callbacks if callback.type == "CheckpointMonitor"), None)
    loading = {"load_path": config.load_checkpoint, "no_load_optim": not config.resume_training}
    if saved is None:
        return {"enable_save": False, **loading}
    return {
        "enable_save": True,
        "save_path": f"{config.output_dir}/checkpoint",
        "save_interleaved_steps": saved.save_checkpoint_steps,
        "save_max": saved.keep_checkpoint_max,
        "async_save": saved.async_save,
        **loading,
    }


def _training(config: RunConfig) -> dict[str, Any]:
    wrapper = config.runner_wrapper
    if not wrapper.use_clip_grad:
        raise config.error("runner_wrapper.use_clip_grad", "gradients are always clipped there; write true")
    return {
        "steps": config.runner_config.train_steps,
        "local_batch_size": config.runner_config.batch_size,
        "global_batch_size": config.global_batch_size,
        "max_norm": wrapper.max_grad_norm,
        "seed": config.seed,
        "deterministic": config.train_precision_sync,
    }


def _optimizer(config: RunConfig) -> dict[str, Any]:
    ours = config.optimizer
    if ours.type == "AdamW":
        return {"type": "AdamW", "betas": [*ours.betas], "eps": ours.eps, "weight_decay": ours.weight_decay}
    return {
        "type": "Muon",
        "adamw_betas": [*ours.betas],
        "adamw_eps": ours.eps,
        "weight_decay": ours.weight_decay,
        "momentum": ours.momentum,
        "nesterov": ours.nesterov,
        "matched_adamw_rms": ours.matched_adamw_rms,
        "qk_clip_enabled": ours.qk_clip_threshold is not None,
        **({} if ours.qk_clip_threshold is None else {"qk_clip_threshold": ours.qk_clip_threshold}),
    }


def _schedule(config: RunConfig) -> dict[str, Any]:
    """Return the schedule. The key names are the same; unset keys are omitted."""
    tree = tree_of(config)["lr_schedule"]
    return {key: value for key, value in tree.items() if value is not None and key != "total_steps"}


def _parallelism(config: RunConfig, layers: Sequence[PlacedLayer]) -> dict[str, Any]:
    ours, scheduler = config.parallel_config, config.parallel.pipeline_config.pipeline_scheduler
    if ours.pipeline_stage > 1 and scheduler != "1f1b":
        raise config.error("parallel.pipeline_config.pipeline_scheduler", "moves as 1f1b alone; write 1f1b")
    shared = config.parallel.enable_parallel_optimizer
    size = config.parallel.parallel_optimizer_config.optimizer_weight_shard_size
    shards = (ours.data_parallel if size == -1 else size) if shared else 1
    if shards != ours.data_parallel:
        message = (
            f"replicas of {shards} shards follow from the launch there; share among all {ours.data_parallel} replicas"
        )
        raise config.error("parallel.enable_parallel_optimizer", message)
    methods = {name: method for method, name in METHODS.items()}
    if ours.context_parallel_algo not in methods:
        message = (
            f"the PyNative trainer has no {ours.context_parallel_algo}; write colossalai_cp, which computes the same"
        )
        raise config.error("parallel_config.context_parallel_algo", message)
    tree: dict[str, Any] = {
        "data_parallel_shard": shards,
        "tensor_parallel": ours.model_parallel,
        "context_parallel": ours.context_parallel,
        "context_parallel_method": methods[ours.context_parallel_algo],
        "pipeline_parallel": ours.pipeline_stage,
        "expert_parallel": ours.expert_parallel,
    }
    if ours.pipeline_stage > 1:
        tree["pipeline_parallel_schedule"] = "1f1b"
        tree["pipeline_parallel_interleave_num"] = config.model.config.pp_interleave_num
        # ['0-3,8-11', '4-7,12-15']: the layers of each stage, chunk by chunk, without those that predict ahead
        stages: list[list[str]] = [[] for _ in range(config.parallel_config.pipeline_stage)]
        numbered = list(enumerate(layers))[: config.model.config.num_layers]
        for (_, stage), run in groupby(numbered, lambda one: (one[1].chunk, one[1].stage)):
            numbers = [number for number, _ in run]
            stages[stage].append(_span(numbers[0], numbers[-1]))
        if any(len(spans) != config.model.config.pp_interleave_num for spans in stages):
            raise config.error(
                f"{SECTION}.offset", "a stage or chunk has no layer, which has no form there; give each one"
            )
        tree["pipeline_parallel_layers_per_stage"] = [",".join(spans) for spans in stages]
    return tree


def _recompute(layers: Sequence[PlacedLayer]) -> dict[str, Any]:
    """Return the recomputed layers, without multi-token prediction layers."""
    numbers = [number for number, layer in enumerate(layers) if layer.recompute]
    if not numbers:
        return {"mode": "None"}
    spans = [[one for _, one in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return {"mode": "full", "full_recompute_layer": [_span(span[0], span[-1]) for span in spans]}


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _data(config: RunConfig) -> dict[str, Any]:
    ours = tree_of(config)["train_dataset"]["data_loader"]["config"]
    steps = config.runner_config.train_steps or 0
    blend = {
        "data_path": _weighted(ours["data_path"]),
        "split": ours["split"],
        "seq_length": config.model.config.seq_length,
        "seed": config.seed,
        "eod_mask_loss": ours["eod_mask_loss"],
        "reset_position_ids": ours["reset_position_ids"],
        "reset_attention_mask": ours["reset_attention_mask"],
        "create_compressed_eod_mask": ours["reset_attention_mask"],
        "create_attention_mask": False,
    }
    loader = {
        "type": "BlendedMegatronDatasetDataLoader",
        "datasets_type": "GPTDataset",
        "sizes": [steps * config.global_batch_size, 0, 0],
        "config": blend,
        "column_names": ["input_ids", "labels", "loss_mask", "position_ids"],
        "shuffle": False,
    }
    return {"dataloader": loader, "drop_remainder": True}


def _weighted(path: Any) -> Any:
    """Return one corpus as a blend."""
    return ["1", path] if isinstance(path, str) else path


def _model(config: RunConfig) -> dict[str, Any]:
    """Return the model with the names of Hugging Face, and of MindFormers for other keys."""
    model = config.model.config
    content = {key: value for key, value in config_json(model, "", {}).items() if key not in UNREAD}
    tree = {key: value for key, value in content.items() if value is not None}
    tree["architectures"] = content["architectures"][0]
    tree |= {name: getattr(model, ours) for name, ours in MODEL.items()}
    tree |= {"use_flash_attention": model.use_flash_attention is not False, "add_bias_linear": False}
    tree |= _positions(config)
    if model.model_type == "qwen3":
        tree["qk_layernorm"] = True
    if model.expert_num > 1:
        tree |= _experts(config)
    if model.num_nextn_predict_layers:
        tree["mtp_loss_scaling_factor"] = model.mtp_loss_factor
    return tree


def _positions(config: RunConfig) -> dict[str, Any]:
    scaling = tree_of(config)["model"]["model_config"]["rope_scaling"]
    if not scaling:
        return {"position_embedding_type": "rope"}
    if scaling["type"] != "yarn":
        raise config.error(f"{SECTION}.rope_scaling", "moves as yarn, or without")
    names = {name: scaling[name] for name in YARN if scaling.get(name) is not None}
    return {"position_embedding_type": "yarn", "scaling_factor": scaling["factor"], **names}


def _experts(config: RunConfig) -> dict[str, Any]:
    model = config.model.config
    kinds, factors = [*model.aux_loss_types], [*model.aux_loss_factors]
    if len(kinds) > 1 or not {*kinds} <= {*LOSSES}:
        message = f"moves as one of {', '.join(LOSSES)}, or without (value {', '.join(kinds)})"
        raise config.error(f"{SECTION}.aux_loss_types", message)
    tree: dict[str, Any] = {
        "moe_grouped_gemm": model.moe_grouped_gemm,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_router_load_balancing_type": LOSSES[kinds[0]] if kinds else "none",
        "moe_router_enable_expert_bias": model.balance_via_topk_bias,
        "moe_token_dispatcher_type": "alltoall",
    }
    if kinds:
        tree["moe_aux_loss_coeff"] = factors[0]
    if model.balance_via_topk_bias:
        tree["moe_router_bias_update_rate"] = model.topk_bias_update_rate
    return tree


def _differences(config: RunConfig, tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys that do not come back unchanged, with a remark.

    Raises:
        UserError: the difference changes the result, or the result cannot be read.
    """
    try:
        again = build_config(convert(Document(tree)), None)
    except UserError as error:
        raise UserError(f"the run has no PyNative form that is read back: {error}") from None
    back: dict[str, Any] = _flat(again)
    lost = []
    for key, value in _flat(config).items():
        if key.startswith(NOT_CARRIED) or back.get(key) == value:
            continue
        known = next((told for prefix, told in TOLD.items() if key.startswith(prefix)), None)
        if known is None and _same_network(config, again, key):
            continue
        if known is None:
            lost.append(f"{key}: has no PyNative form (value {shown(value)}); it comes back as {shown(back.get(key))}")
        else:
            yield key, known
    if lost:
        raise UserError("\n".join(lost))


def _flat(config: RunConfig) -> dict[str, Any]:
    """Return every value by its dotted key."""
    return {
        ".".join(map(str, path)): _weighted(value) if path[-1] == "data_path" else value
        for path, value in leaves(tree_of(config))
    }


def _same_network(config: RunConfig, reread: RunConfig, key: str) -> bool:
    """Return True if a key of the architecture has another form with the same meaning."""
    name = key.removeprefix(f"{SECTION}.").partition(".")[0]
    is_model_key = key.startswith(SECTION) and (name == "offset" or name not in RUN_KEYS)
    return is_model_key and config.model.config.architecture == reread.model.config.architecture
