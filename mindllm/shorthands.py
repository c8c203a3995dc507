"""Short names of keys on every command line of a run, which ``--help`` lists without importing the schema.

Options of ms-swift, LLaMA-Factory and the trainer of transformers are listed with the key or option to use instead.
"""

SHORTHANDS = {  # options of MindFormers and other trainers that are not top-level keys
    "epochs": "runner_config.epochs",
    "batch_size": "runner_config.batch_size",
    "gradient_accumulation_steps": "runner_config.gradient_accumulation_steps",
    "train_dataset_dir": "train_dataset.data_loader.config.data_path",
    "device_target": "context.device_target",
    "device_id": "context.device_id",
    "predict_data": "input_data",
    "do_sample": "generation.do_sample",
    "max_new_tokens": "generation.max_new_tokens",
    "temperature": "generation.temperature",
    "top_k": "generation.top_k",
    "top_p": "generation.top_p",
    "system_prompt": "generation.system_prompt",
    "seq_length": "model.model_config.seq_length",
    "learning_rate": "lr_schedule.learning_rate",
    "train_steps": "runner_config.train_steps",
    "warmup_ratio": "lr_schedule.warmup_ratio",
    "lora_rank": "model.model_config.pet_config.lora_rank",
    "lora_alpha": "model.model_config.pet_config.lora_alpha",
    "lora_dropout": "model.model_config.pet_config.lora_dropout",
    "target_modules": "model.model_config.pet_config.target_modules",
}

IGNORE_UNKNOWN_KEYS = "--ignore-unknown-keys"
"""Option of every command line of a run: unknown keys of its YAML are reported and ignored."""

MODEL = "pass the model as the first argument: mindllm finetune MODEL DATA"
DATA = "pass the data after the model: mindllm finetune MODEL DATA"
METHOD = "use mindllm finetune --method, such as lora, full or dpo"
LENGTH = "write model.model_config.seq_length (--seq-length)"
ROWS = "write runner_config.batch_size (--batch-size)"
DTYPE = "write model.model_config.compute_dtype: bfloat16, float16 or float32"
TEMPLATE = "write train_dataset.data_loader.config.chat_template; the default is the template of the tokenizer"
SPLIT = 'write train_dataset.data_loader.config.split, such as "90,10"'
LAYOUT = "write the sizes of parallel_config; parallel.enable_parallel_optimizer shards the optimizer state"
QUANTIZED = "quantize the model with mindllm quantize, then use --method qlora"
IDLE = "remove it; it has no equivalent"
FOREIGN_OPTIONS = {
    **dict.fromkeys(("model_name_or_path", "model_id_or_path", "model_id"), MODEL),
    **dict.fromkeys(("dataset", "train_dataset_path", "train_file", "data_path", "dataset_dir"), DATA),
    **dict.fromkeys(("train_type", "finetuning_type", "sft_type", "tuner_type", "stage", "rlhf_type"), METHOD),
    **dict.fromkeys(("max_length", "cutoff_len", "max_seq_length", "max_seq_len", "model_max_length"), LENGTH),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "micro_batch_size"), ROWS),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "dtype"), DTYPE),
    **dict.fromkeys(("template", "template_type"), TEMPLATE),
    **dict.fromkeys(("val_size", "split_dataset_ratio"), SPLIT),
    **dict.fromkeys(("deepspeed", "fsdp", "tensor_model_parallel_size", "pipeline_model_parallel_size"), LAYOUT),
    **dict.fromkeys(("quant_bits", "quant_method", "quantization_bit", "load_in_4bit"), QUANTIZED),
    **dict.fromkeys(("num_train_epochs", "train_epochs"), "write runner_config.epochs (--epochs)"),
    **dict.fromkeys(("max_steps", "train_iters"), "write runner_config.train_steps (--train-steps)"),
    **dict.fromkeys(("attn_impl", "flash_attn"), "write model.model_config.use_flash_attention"),
    **dict.fromkeys(
        ("do_train", "trust_remote_code", "preprocessing_num_workers", "dataloader_num_workers", "dataset_num_proc"),
        IDLE,
    ),
    "lr": "write lr_schedule.learning_rate (--learning-rate)",
    "lr_scheduler_type": "write lr_schedule.type",
    "lora_target": "write model.model_config.pet_config.target_modules (--target-modules)",
    "resume_from_checkpoint": "write resume_training (--resume-training)",
    "per_device_eval_batch_size": "write eval_dataset.batch_size",
    "logging_steps": "write callbacks.MFLossMonitor.per_print_times",
    "save_steps": "write callbacks.CheckpointMonitor.save_checkpoint_steps",
    "save_total_limit": "write callbacks.CheckpointMonitor.keep_checkpoint_max",
    "eval_steps": "write eval_step_interval, with do_eval: true",
    "plot_loss": "remove it; mindllm loss-curve draws the losses of a run",
    "gradient_checkpointing": "write recompute_config.recompute",
    "max_samples": "write train_dataset.data_loader.config.max_rows",
    "merge_lora": "use mindllm weights merge",
    "adapters": "write load_adapter",
    "system": "write generation.system_prompt (--system-prompt) for answers; each row of data has its own system message",
    "overwrite_output_dir": "write overwrite (--overwrite)",
}
