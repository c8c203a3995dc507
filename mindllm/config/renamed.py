"""Keys of other suites: synonyms that are accepted, and keys that live elsewhere here or have no meaning here."""

from __future__ import annotations

from mindllm.config.document import Document, KeyPath, Origin, Problem, child, dotted

# Section -> key of Hugging Face -> key of mindllm.
SYNONYMS: dict[KeyPath, dict[str, str]] = {
    ("model", "model_config"): {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "n_kv_heads",
        "rope_theta": "theta",
        "max_position_embeddings": "max_position_embedding",
    },
    ("model", "model_config", "rope_scaling"): {"rope_type": "type"},
}

# Dotted key of MindFormers -> what to write instead.
MOVED: dict[str, str] = {
    "optimizer.learning_rate": "write lr_schedule.learning_rate",
    "optimizer.beta1": "write optimizer.betas: [beta1, beta2]",
    "optimizer.beta2": "write optimizer.betas: [beta1, beta2]",
    "runner_config.sink_mode": "remove it: there is no data sinking, every step is one call of the compiled graph",
    "runner_config.sink_size": "remove it: there is no data sinking, every step is one call of the compiled graph",
    "runner_config.num_classes": "remove it: models are language models",
    "train_dataset.batch_size": "write runner_config.batch_size",
    "train_dataset.seed": "write the top-level seed",
    "train_dataset.dataset_dir": "write train_dataset.data_loader.config.data_path",
    "train_dataset.data_loader.dataset_dir": "write train_dataset.data_loader.config.data_path",
    "train_dataset.data_loader.config.seed": "write the top-level seed",
    "train_dataset.data_loader.config.seq_length": "write model.model_config.seq_length",
    "train_dataset.input_columns": "remove it: the columns are input_ids, labels and loss_mask",
    "train_dataset_task": "remove it: train_dataset says everything",
    "eval_dataset_task": "remove it: eval_dataset says everything",
    "eval_dataset.data_loader": "write eval_dataset.split: the held-out text is a part of train_dataset's files",
    "eval_callbacks": "remove it: do_eval and eval_step_interval say when to evaluate",
    "metric": "remove it: loss, perplexity and bits per byte are always reported",
    "model.model_config.batch_size": "write runner_config.batch_size",
    "model.model_config.checkpoint_name_or_path": "write load_checkpoint",
    "model.model_config.scaling_factor": "write model.model_config.rope_scaling: {type: linear, factor: ...}",
    "model.model_config.extend_method": "write model.model_config.rope_scaling",
    "model.model_config.use_past": "remove it: run_mode predict always uses the key/value cache",
    "model.model_config.max_decode_length": "write generation.max_new_tokens",
    "model.model_config.max_new_tokens": "write generation.max_new_tokens",
    "model.model_config.do_sample": "write generation.do_sample",
    "model.model_config.temperature": "write generation.temperature",
    "model.model_config.top_k": "write generation.top_k",
    "model.model_config.top_p": "write generation.top_p",
    "model.model_config.repetition_penalty": "write generation.repetition_penalty",
    "model.model_config.num_beams": "write generation.num_beams",
    "parallel_config.micro_batch_interleave_num": "remove it: multi-copy parallel is not part of mindllm",
    "micro_batch_interleave_num": "remove it: multi-copy parallel is not part of mindllm",
    "parallel_config.optimizer_shard": "write parallel.enable_parallel_optimizer",
    "parallel.search_mode": "remove it: strategies are declared, not searched",
    "parallel.pp_interleave_num": "write model.model_config.pp_interleave_num",
    "auto_trans_ckpt": "remove it: checkpoints hold whole parameters, whatever the layout",
    "src_strategy_path_or_dir": "remove it: checkpoints hold whole parameters, whatever the layout",
    "load_ckpt_format": "remove it: checkpoints are safetensors",
    "infer_precision_sync": "write train_precision_sync",
    "predict_data": "write input_data",
}


def rename(document: Document) -> None:
    """Gives synonyms their mindllm names, in place; a key that is given under both names becomes a problem."""
    for section, names in SYNONYMS.items():
        values = document.data
        for key in section:
            values = child(values, key)
        if isinstance(values, dict):
            for former, name in names.items():
                if former in values:
                    _rename_key(document, values, section, former, name)


def _rename_key(document: Document, values: dict, section: KeyPath, former: str, name: str) -> None:
    path = (*section, former)
    value = values.pop(former)
    if name in values:
        message = f"another name of {dotted((*section, name))}, which is given too (value {values[name]}); keep one"
        document.problems.append(Problem(document.origins.get(path), path, message))
        return
    values[name] = value
    moved: dict[KeyPath, Origin] = {}
    for known in [known for known in document.origins if known[: len(path)] == path]:
        renamed = (*section, name, *known[len(path) :])
        moved[renamed] = document.origins.pop(known)
    document.origins.update(moved)
