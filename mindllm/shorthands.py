"""Short names of keys, on every command line with a configuration; ``--help`` lists them without importing the schema."""

SHORTHANDS = {  # options of MindFormers' command line that are not keys of the top level
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
}
