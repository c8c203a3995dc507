"""Short names of keys, on every command line with a configuration; ``--help`` lists them without importing the schema.

Beside them what others call them: options of ms-swift, LLaMA-Factory and transformers' trainer that people type from habit.
"""

SHORTHANDS = {  # options of MindFormers' command line, and of others, that are not keys of the top level
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
"""Option of every command line with keys: unknown keys of a YAML are named and ignored."""

MODEL = "the model is the first word: mindllm finetune MODEL DATA"
DATA = "data are named behind the model: mindllm finetune MODEL DATA"
METHOD = "write --method of mindllm finetune, such as lora, full or dpo"
LENGTH = "write model.model_config.seq_length (--seq_length)"
ROWS = "write runner_config.batch_size (--batch_size)"
DTYPE = "write model.model_config.compute_dtype: bfloat16, float16 or float32"
TEMPLATE = "write train_dataset.data_loader.config.chat_template; without it the tokenizer's own is used"
HELD_OUT = 'write train_dataset.data_loader.config.split, such as "90,10"'
LAYOUT = "write the sizes of parallel_config; parallel.enable_parallel_optimizer shares the optimizer's state"
CODES = "mindllm quantize makes weights in codes, which --method qlora tunes"
IDLE = "remove it: there is nothing to choose here"
OF_OTHERS = {
    **dict.fromkeys(("model_name_or_path", "model_id_or_path", "model_id"), MODEL),
    **dict.fromkeys(("dataset", "train_dataset_path", "train_file", "data_path", "dataset_dir"), DATA),
    **dict.fromkeys(("train_type", "finetuning_type", "sft_type", "tuner_type", "stage", "rlhf_type"), METHOD),
    **dict.fromkeys(("max_length", "cutoff_len", "max_seq_length", "max_seq_len", "model_max_length"), LENGTH),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_batch_size", "micro_batch_size"), ROWS),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "dtype"), DTYPE),
    **dict.fromkeys(("template", "template_type"), TEMPLATE),
    **dict.fromkeys(("val_size", "split_dataset_ratio"), HELD_OUT),
    **dict.fromkeys(("deepspeed", "fsdp", "tensor_model_parallel_size", "pipeline_model_parallel_size"), LAYOUT),
    **dict.fromkeys(("quant_bits", "quant_method", "quantization_bit", "load_in_4bit"), CODES),
    **dict.fromkeys(("num_train_epochs", "train_epochs"), "write runner_config.epochs (--epochs)"),
    **dict.fromkeys(("max_steps", "train_iters"), "write runner_config.train_steps (--train_steps)"),
    **dict.fromkeys(("attn_impl", "flash_attn"), "write model.model_config.use_flash_attention"),
    **dict.fromkeys(
        ("do_train", "trust_remote_code", "preprocessing_num_workers", "dataloader_num_workers", "dataset_num_proc"),
        IDLE,
    ),
    "lr": "write lr_schedule.learning_rate (--learning_rate)",
    "lr_scheduler_type": "write lr_schedule.type",
    "lora_target": "write model.model_config.pet_config.target_modules (--target_modules)",
    "resume_from_checkpoint": "write resume_training (--resume_training)",
    "per_device_eval_batch_size": "write eval_dataset.batch_size",
    "logging_steps": "write callbacks.MFLossMonitor.per_print_times",
    "save_steps": "write callbacks.CheckpointMonitor.save_checkpoint_steps",
    "save_total_limit": "write callbacks.CheckpointMonitor.keep_checkpoint_max",
    "eval_steps": "write eval_step_interval, with do_eval: true",
    "plot_loss": "remove it: mindllm loss-curve draws the losses of a run",
    "gradient_checkpointing": "write recompute_config.recompute",
    "max_samples": "write train_dataset.data_loader.config.max_rows",
    "merge_lora": "mindllm weights merge does it",
    "adapters": "write load_adapter",
    "system": "write generation.system_prompt (--system_prompt) for answers; rows of data have a system message of their own",
    "overwrite_output_dir": "write overwrite (--overwrite)",
}
