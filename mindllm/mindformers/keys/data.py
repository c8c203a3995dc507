"""Keys of MindFormers about text: train_dataset and its task, eval_dataset, processor (the tokenizer)."""

from __future__ import annotations

from mindllm.mindformers.keys.rules import Table, decided, idle, only, refused

READING = "a batch is a function of (seed, consumed samples), whatever reads it and how fast"
COLUMNS = "columns are input_ids, labels and what keeps documents apart, found by their names"
COPY = "the same section again, by its anchor"
FILE_SAYS = "the tokenizer's own file says it"
SEEN = "padding stands behind the text, where nothing looks at it"
OTHER_EVALUATION = "do_eval is off; the held-out text is a part of train_dataset's files here"
PICTURES = "models are of text alone: no pictures, no videos"

LOADER: Table = {
    "type": decided("train_dataset.data_loader.type"),
    "dataset_dir": decided("train_dataset.data_loader.config.data_path"),
    "dataset_files": decided("train_dataset.data_loader.config.data_path"),
    "data_files": decided("train_dataset.data_loader.config.data_path"),
    "path": decided("train_dataset.data_loader.config.data_path"),
    "load_func": only(
        "load_dataset", None, reason="files are read as they are", otherwise="files are read as they are"
    ),
    "split": decided("train_dataset.data_loader.config.split"),
    "name": refused("a data set is the files of data_path here"),
    "streaming": idle(READING),
    "shuffle": decided("seed"),
    "phase": idle("the file is named, and it is read whole"),
    "version": idle("the chat template says how a conversation is written"),
    "origin_columns": decided("train_dataset.data_loader.config.handler"),
    "handler.[].type": decided("train_dataset.data_loader.config.handler"),
    "handler.[].seq_length": decided("model.model_config.seq_length"),
    "handler.[].n": decided("train_dataset.data_loader.config.split"),
    "handler.[].padding": idle(SEEN),
    "handler.[].pack_strategy": decided("train_dataset.data_loader.config.packing"),
    "handler.[].prompt_key": idle("the chat template says how a conversation is written"),
    "handler.[].output_columns": idle(COLUMNS),
    "handler.[].tokenizer.*": idle(FILE_SAYS),
    "annotation_file": refused(PICTURES),
    "packing": decided("train_dataset.data_loader.config.packing"),
    "adaptor_config.*": idle("masks follow from where documents begin"),
    "create_attention_mask": decided("train_dataset.data_loader.config.packing"),
    "create_compressed_eod_mask": decided("train_dataset.data_loader.config.packing"),
    "compressed_eod_mask_length": idle("masks follow from where documents begin"),
    "use_broadcast_data": idle(READING),
    "datasets_type": only("GPTDataset", reason="the only kind", otherwise="only GPTDataset is a kind of blend here"),
    "sizes": decided("runner_config.train_steps"),
    "column_names": idle(COLUMNS),
    "python_multiprocessing": idle(READING),
    "config.data_path": decided("train_dataset.data_loader.config.data_path"),
    "config.split": decided("train_dataset.data_loader.config.split"),
    "config.seq_length": decided("model.model_config.seq_length"),
    "config.seed": decided("seed"),
    "config.random_seed": decided("seed"),
    "config.eod": decided("model.model_config.eos_token_id"),
    "config.pad": idle("samples of a blend are full"),
    "config.eod_mask_loss": decided("train_dataset.data_loader.config.eod_mask_loss"),
    "config.reset_position_ids": decided("train_dataset.data_loader.config.reset_position_ids"),
    "config.reset_attention_mask": decided("train_dataset.data_loader.config.reset_attention_mask"),
    "config.create_attention_mask": idle("masks follow from where documents begin"),
    "config.create_compressed_eod_mask": decided("train_dataset.data_loader.config.reset_attention_mask"),
    "config.eod_pad_length": idle("masks follow from where documents begin"),
    "config.num_dataset_builder_threads": idle(READING),
    "config.path_to_cache": idle("indices are kept beside the files"),
}
DATASET: Table = {
    **{f"data_loader.{key}": rule for key, rule in LOADER.items()},
    "input_columns": idle(COLUMNS),
    "output_columns": idle(COLUMNS),
    "column_order": idle(COLUMNS),
    "construct_args_key": idle(COLUMNS),
    "batch_size": decided("runner_config.batch_size"),
    "seed": decided("seed"),
    "repeat": only(
        1, None, reason="runner_config.epochs says how often", otherwise="runner_config.epochs says how often"
    ),
    "drop_remainder": only(
        True, None, reason="batches are always full", otherwise="batches are always full; a last part is left out"
    ),
    "num_parallel_workers": idle(READING),
    "python_multiprocessing": idle(READING),
    "numa_enable": idle(READING),
    "prefetch_size": idle(READING),
    "tokenizer.type": idle(FILE_SAYS),
    "tokenizer.vocab_file": decided("processor.tokenizer.vocab_file"),
    "tokenizer.*": idle(FILE_SAYS),
    "max_source_length": idle("a conversation is cut as a whole, at model.model_config.seq_length"),
    "max_target_length": idle("a conversation is cut as a whole, at model.model_config.seq_length"),
    "max_length": idle("a conversation is cut as a whole, at model.model_config.seq_length"),
    "max_seq_length": refused("it belongs to a data set of its own code"),
    "ignore_pad_token_for_loss": only(
        True, None, reason="padding never has a loss", otherwise="padding never has a loss here"
    ),
    "eos_id": refused("it belongs to a data set of its own code"),
    "gmask_id": refused("it belongs to a data set of its own code"),
    "sop_id": refused("it belongs to a data set of its own code"),
    "micro_batch": refused("it belongs to a data set of its own code"),
    "dataloader.*": decided("train_dataset.data_loader"),  # the PyNative form
    "modal_to_text_transform.*": refused(PICTURES),
}
DATA: Table = {
    **{f"train_dataset.{key}": rule for key, rule in DATASET.items()},
    "train_dataset.dataset_dir": decided("train_dataset.data_loader.config.data_path"),
    "train_dataset_task": idle("train_dataset says everything"),
    "eval_dataset_task": idle("eval_dataset says everything"),
    "train_dataset_task.type": decided("train_dataset.data_loader.type"),
    "train_dataset_task.auto_register": refused("code beside the YAML is never run"),
    **{f"train_dataset_task.dataset_config.{key}": idle(COPY) for key in DATASET},
    **{f"eval_dataset.{key}": idle(OTHER_EVALUATION) for key in DATASET},
    "eval_dataset_task.type": idle(OTHER_EVALUATION),
    **{f"eval_dataset_task.dataset_config.{key}": idle(COPY) for key in DATASET},
    "processor.type": idle(FILE_SAYS),
    "processor.return_tensors": idle("prompts go straight into the compiled graph"),
    "processor.audio_processor": only(None, reason="empty", otherwise=PICTURES),
    "processor.image_processor": only(None, reason="empty", otherwise=PICTURES),
    "processor.audio_processor.*": refused("models are language models"),
    "processor.image_processor.*": refused("models are language models"),
    "processor.model_transform_template.*": refused(PICTURES),
    "processor.max_length": refused(PICTURES),
    "processor.tokenizer.vocab_file": decided("processor.tokenizer.vocab_file"),
    "processor.tokenizer.tokenizer_file": decided("processor.tokenizer.vocab_file"),
    "processor.tokenizer.merges_file": idle("tokenizer.json holds merges and vocabulary"),
    "processor.tokenizer.auto_register": idle(
        "code beside the YAML is never run; the tokenizer's file is read instead"
    ),
    "processor.tokenizer.chat_template": idle("the chat template is that of the tokenizer's directory"),
    **{
        f"processor.tokenizer.{key}": idle(FILE_SAYS)
        for key in [
            "type",
            "add_bos_token",
            "add_eos_token",
            "bos_token",
            "end_token",
            "eos_token",
            "gmask_token",
            "mask_token",
            "model_max_length",
            "pad_token",
            "unk_token",
            "padding_side",
            "truncation_side",
            "trust_remote_code",
            "additional_special_tokens",
            "name_or_path",
            "fast_tokenizer",
            "errors",
            "add_prefix_space",
            "use_default_system_prompt",
            "legacy",
        ]
    },
}
