"""YAMLs as users of MindFormers have them, written for the tests: the keys and values that its public files share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

LLAMA2_7B: dict[str, Any] = {
    "type": "LlamaConfig",
    "batch_size": 1,
    "seq_length": 4096,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "vocab_size": 32000,
    "multiple_of": 256,
    "rms_norm_eps": 1.0e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "ignore_token_id": -100,
    "compute_dtype": "bfloat16",
    "layernorm_compute_type": "float32",
    "softmax_compute_type": "float32",
    "rotary_dtype": "float32",
    "param_init_type": "float16",
    "use_past": False,
    "extend_method": "None",
    "scaling_factor": 1.0,
    "use_flash_attention": True,
    "offset": 0,
    "fine_grain_interleave": 1,
    "qkv_concat": False,
    "checkpoint_name_or_path": "llama2_7b",
    "repetition_penalty": 1,
    "max_decode_length": 512,
    "top_k": 3,
    "top_p": 1,
    "do_sample": False,
}
MIND_RECORD: dict[str, Any] = {
    "data_loader": {"type": "MindDataset", "dataset_dir": "", "shuffle": True},
    "input_columns": ["input_ids"],
    "num_parallel_workers": 8,
    "python_multiprocessing": False,
    "drop_remainder": True,
    "batch_size": 6,
    "repeat": 1,
    "numa_enable": False,
    "prefetch_size": 1,
}
LEGACY: dict[str, Any] = {
    "seed": 0,
    "output_dir": "./output",
    "load_checkpoint": "",
    "src_strategy_path_or_dir": "",
    "auto_trans_ckpt": False,
    "only_save_strategy": False,
    "resume_training": False,
    "run_mode": "train",
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "llama2_7b"},
    "runner_config": {
        "epochs": 2,
        "batch_size": 1,
        "sink_mode": True,
        "sink_size": 1,
        "gradient_accumulation_steps": 8,
    },
    "optimizer": {
        "type": "FP32StateAdamWeightDecay",
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1.0e-8,
        "learning_rate": 5.0e-5,
    },
    "lr_schedule": {
        "type": "CosineWithWarmUpLR",
        "learning_rate": 5.0e-5,
        "lr_end": 0,
        "warmup_ratio": 0.03,
        "total_steps": -1,
    },
    "train_dataset": MIND_RECORD,
    "train_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": MIND_RECORD},
    "do_eval": False,
    "eval_step_interval": -1,
    "eval_epoch_interval": 50,
    "eval_dataset": MIND_RECORD,
    "eval_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": MIND_RECORD},
    "use_parallel": True,
    "parallel": {
        "parallel_mode": 1,
        "gradients_mean": False,
        "enable_alltoall": False,
        "full_batch": True,
        "search_mode": "sharding_propagation",
        "enable_parallel_optimizer": True,
        "strategy_ckpt_save_file": "./ckpt_strategy.ckpt",
        "parallel_optimizer_config": {"gradient_accumulation_shard": False, "parallel_optimizer_threshold": 64},
    },
    "parallel_config": {
        "data_parallel": 8,
        "model_parallel": 1,
        "pipeline_stage": 1,
        "use_seq_parallel": False,
        "micro_batch_num": 1,
        "vocab_emb_dp": True,
        "gradient_aggregation_group": 4,
    },
    "micro_batch_interleave_num": 1,
    "recompute_config": {
        "recompute": True,
        "select_recompute": False,
        "parallel_optimizer_comm_recompute": False,
        "mp_comm_recompute": True,
        "recompute_slice_activation": True,
    },
    "callbacks": [
        {"type": "MFLossMonitor"},
        {
            "type": "CheckpointMonitor",
            "prefix": "llama2_7b",
            "save_checkpoint_steps": 100,
            "integrated_save": False,
            "async_save": False,
        },
        {"type": "ObsMonitor"},
    ],
    "context": {
        "mode": 0,
        "device_target": "Ascend",
        "max_call_depth": 10000,
        "max_device_memory": "58GB",
        "save_graphs": False,
        "save_graphs_path": "./graph",
        "device_id": 0,
        "jit_config": {"jit_level": "O1"},
        "ascend_config": {"precision_mode": "must_keep_origin_dtype"},
    },
    "model": {"model_config": LLAMA2_7B, "arch": {"type": "LlamaForCausalLM"}},
    "processor": {
        "return_tensors": "ms",
        "tokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "type": "LlamaTokenizer"},
        "type": "LlamaProcessor",
    },
    "metric": {"type": "PerplexityMetric"},
    "runner_wrapper": {
        "type": "MFTrainOneStepCell",
        "scale_sense": {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": 65536,
            "scale_factor": 2,
            "scale_window": 1000,
        },
        "use_clip_grad": True,
    },
    "moe_config": {"expert_num": 1, "capacity_factor": 1.05, "aux_loss_factor": 0.05, "num_experts_chosen": 1},
    "eval_callbacks": [{"type": "ObsMonitor", "keep_last": False}],
    "auto_tune": False,
    "filepath_prefix": "./autotune",
    "autotune_per_step": 10,
    "profile": False,
    "profile_start_step": 1,
    "profile_stop_step": 10,
    "init_start_profile": False,
    "profile_communication": False,
    "profile_memory": True,
    "layer_scale": False,
    "layer_decay": 0.65,
    "lr_scale_factor": 256,
    "remote_save_url": "Please input obs url on AICC platform.",
}
BLEND: dict[str, Any] = {
    "data_loader": {
        "type": "BlendedMegatronDatasetDataLoader",
        "datasets_type": "GPTDataset",
        "sizes": [8000, 0, 0],
        "config": {
            "seed": 1234,
            "split": "1, 0, 0",
            "seq_length": 4096,
            "eod_mask_loss": False,
            "reset_position_ids": False,
            "create_attention_mask": False,
            "reset_attention_mask": False,
            "create_compressed_eod_mask": False,
            "eod_pad_length": 128,
            "eod": 1,
            "pad": -1,
            "data_path": ["1", "/path/to/wiki_text_document"],
        },
    },
    "input_columns": ["input_ids", "labels", "loss_mask", "position_ids"],
    "construct_args_key": ["input_ids", "labels", "loss_mask", "position_ids"],
    "num_parallel_workers": 8,
    "seed": 1234,
}
MCORE: dict[str, Any] = {
    "seed": 42,
    "run_mode": "train",
    "use_legacy": False,
    "use_parallel": True,
    "load_ckpt_format": "safetensors",
    "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "llama"},
    "runner_config": {"epochs": 2, "batch_size": 1, "gradient_accumulation_steps": 1},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 0.01},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1.0e-6, "warmup_ratio": 0, "total_steps": -1},
    "train_dataset": BLEND,
    "train_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": BLEND},
    "context": {"mode": 0, "device_target": "Ascend", "max_device_memory": "58GB", "jit_config": {"jit_level": "O0"}},
    "parallel_config": {
        "data_parallel": 2,
        "model_parallel": 2,
        "pipeline_stage": 2,
        "micro_batch_num": 4,
        "use_seq_parallel": True,
        "gradient_aggregation_group": 1,
    },
    "micro_batch_interleave_num": 1,
    "parallel": {
        "parallel_mode": 1,
        "enable_alltoall": True,
        "full_batch": False,
        "dataset_strategy": [[2, 1]] * 4,
        "search_mode": "sharding_propagation",
        "strategy_ckpt_config": {"save_file": "./ckpt_strategy.ckpt", "only_trainable_params": False},
        "enable_parallel_optimizer": True,
    },
    "recompute_config": {
        "recompute": False,
        "select_recompute": [r"mlp\.mul", r"mlp\.activation_func\.silu"],
        "parallel_optimizer_comm_recompute": True,
        "mp_comm_recompute": True,
    },
    "model": {
        "model_config": {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "swiglu",
            "max_position_embeddings": 8192,
            "seq_length": 4096,
            "initializer_range": 0.02,
            "rms_norm_eps": 1.0e-6,
            "use_cache": True,
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "input_sliced_sig": True,
            "untie_embeddings_and_output_weights": True,
            "position_embedding_type": "rope",
            "offset": 0,
            "params_dtype": "float32",
            "compute_dtype": "bfloat16",
            "layernorm_compute_dtype": "float32",
            "softmax_compute_dtype": "float32",
            "fp32_residual_connection": False,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }
    },
    "callbacks": [
        {"type": "MFLossMonitor"},
        {
            "type": "CheckpointMonitor",
            "prefix": "llama",
            "save_checkpoint_steps": 5000,
            "keep_checkpoint_max": 1,
            "checkpoint_format": "safetensors",
        },
    ],
    "runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True},
}


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` with dotted keys set, or removed where the value is ``...``."""
    result = copy.deepcopy(tree)
    for key, value in changes.items():
        section = result
        *around, last = key.split("/") if "/" in key else key.split(".")
        for part in around:
            section = section.setdefault(part, {})
        if value is ...:
            section.pop(last, None)
        else:
            section[last] = value
    for name in ("train_dataset", "eval_dataset"):  # as their anchors do
        if name in result and "dataset_config" in result.get(f"{name}_task", {}):
            result[f"{name}_task"]["dataset_config"] = copy.deepcopy(result[name])
    return result


def writer(directory: Path) -> Callable[..., Path]:
    """Writes a changed tree into ``directory``."""

    def write(tree: dict[str, Any], changes: dict[str, Any] | None = None, name: str = "theirs.yaml") -> Path:
        path = directory / name
        path.write_text(yaml.safe_dump(changed(tree, changes or {}), sort_keys=False), encoding="utf-8")
        return path

    return write
