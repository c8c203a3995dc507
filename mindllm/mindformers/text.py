"""Keys of data (MindDataset, ADGen, Megatron blends, Hugging Face's loader on local files) and tokenizers; their translation."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from mindllm.config.reading.document import leaves, path_of
from mindllm.errors import nearest
from mindllm.mindformers.directory import expected_tokenizer
from mindllm.mindformers.reading import Outcome, Reading, Table, decided, idle, only, refused

READING = "a batch is a function of (seed, consumed samples), whatever reads it and how fast"
COLUMNS = "columns are input_ids, labels and what keeps documents apart, found by their names"
COPY = "the same section again, by its anchor"
IN_FILE = "part of the tokenizer's file"
PADDING = "padding follows the text and is not attended to"
EVALUATION_OFF = "do_eval is off; the held-out text is a part of train_dataset's files here"
PICTURES = "models are of text alone: no pictures, no videos"

LOADER_KEYS: Table = {
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
    "version": idle("the chat template decides how a conversation is written"),
    "origin_columns": decided("train_dataset.data_loader.config.handler"),
    "handler.[].type": decided("train_dataset.data_loader.config.handler"),
    "handler.[].seq_length": decided("model.model_config.seq_length"),
    "handler.[].n": decided("train_dataset.data_loader.config.split"),
    "handler.[].padding": idle(PADDING),
    "handler.[].pack_strategy": decided("train_dataset.data_loader.config.packing"),
    "handler.[].prompt_key": idle("the chat template decides how a conversation is written"),
    "handler.[].output_columns": idle(COLUMNS),
    "handler.[].tokenizer.*": idle(IN_FILE),
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
    "config.path_to_cache": idle("indices are stored next to the files"),
}
DATASET: Table = {
    **{f"data_loader.{key}": rule for key, rule in LOADER_KEYS.items()},
    "input_columns": idle(COLUMNS),
    "output_columns": idle(COLUMNS),
    "column_order": idle(COLUMNS),
    "construct_args_key": idle(COLUMNS),
    "batch_size": decided("runner_config.batch_size"),
    "seed": decided("seed"),
    "repeat": only(
        1, None, reason="runner_config.epochs decides how often", otherwise="runner_config.epochs decides how often"
    ),
    "drop_remainder": only(
        True, None, reason="batches are always full", otherwise="batches are always full; a last part is left out"
    ),
    "num_parallel_workers": idle(READING),
    "python_multiprocessing": idle(READING),
    "numa_enable": idle(READING),
    "prefetch_size": idle(READING),
    "tokenizer.type": idle(IN_FILE),
    "tokenizer.vocab_file": decided("processor.tokenizer.vocab_file"),
    "tokenizer.*": idle(IN_FILE),
    "max_source_length": idle("a conversation is cut as a whole, at model.model_config.seq_length"),
    "max_target_length": idle("a conversation is cut as a whole, at model.model_config.seq_length"),
    "max_length": idle("a conversation is cut as a whole, at model.model_config.seq_length"),
    "max_seq_length": refused("it belongs to a data set with its own code"),
    "ignore_pad_token_for_loss": only(
        True, None, reason="padding never has a loss", otherwise="padding never has a loss here"
    ),
    "eos_id": refused("it belongs to a data set with its own code"),
    "gmask_id": refused("it belongs to a data set with its own code"),
    "sop_id": refused("it belongs to a data set with its own code"),
    "micro_batch": refused("it belongs to a data set with its own code"),
    "dataloader.*": decided("train_dataset.data_loader"),  # the PyNative form
    "modal_to_text_transform.*": refused(PICTURES),
}
DATA: Table = {
    **{f"train_dataset.{key}": rule for key, rule in DATASET.items()},
    "train_dataset.dataset_dir": decided("train_dataset.data_loader.config.data_path"),
    "train_dataset_task": idle("train_dataset applies"),
    "eval_dataset_task": idle("eval_dataset applies"),
    "train_dataset_task.type": decided("train_dataset.data_loader.type"),
    "train_dataset_task.auto_register": refused("code of the user is never run"),
    **{f"train_dataset_task.dataset_config.{key}": idle(COPY) for key in DATASET},
    **{f"eval_dataset.{key}": idle(EVALUATION_OFF) for key in DATASET},
    "eval_dataset_task.type": idle(EVALUATION_OFF),
    **{f"eval_dataset_task.dataset_config.{key}": idle(COPY) for key in DATASET},
    "processor.type": idle(IN_FILE),
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
    "processor.tokenizer.auto_register": idle("code of the user is never run; the tokenizer's file is read instead"),
    "processor.tokenizer.chat_template": idle("the chat template is that of the tokenizer's directory"),
    **{
        f"processor.tokenizer.{key}": idle(IN_FILE)
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


LOADER, STEPS = "train_dataset.data_loader", "runner_config.train_steps"
OURS = "train_dataset.data_loader.config"
PATH = f"{OURS}.data_path"
TOKENIZER = "processor.tokenizer.vocab_file"
NOT_NAMED = {
    "MindDataset": "/path/to/train.mindrecord",
    "BlendedMegatronDatasetDataLoader": "/path/to/megatron_text_document",
    "CommonDataLoader": "/path/to/conversations.json",
}
KINDS = {
    "MindDataset": "MindDataset",
    "BlendedMegatronDatasetDataLoader": "BlendedMegatronDatasetDataLoader",
    "ADGenDataLoader": "CommonDataLoader",
    "HFDataLoader": "CommonDataLoader",
    "CommonDataLoader": "CommonDataLoader",
}
TASKS = ("CausalLanguageModelDataset", "KeyWordGenDataset")
HANDLERS = {"AlpacaInstructDataHandler": "alpaca", "PackingHandler": "", "take": ""}
SEED_REASON = "one seed, that of the run, decides the order"
READABLE = (".model", ".json", ".tiktoken")
LOADED_NAMES = ("json", "csv", "parquet", "text", "arrow")


def translate_text(reading: Reading) -> None:
    """Translate ``train_dataset``, ``train_dataset_task`` and ``processor``; the schedule must have been translated."""
    if reading.get("run_mode", "train") in ("train", "finetune") and not reading.get("train_dataset"):
        reading.refuse("train_dataset", "no data set is named, and MindFormers cannot train without one, either")
    _task(reading)
    kind = reading.word(f"{LOADER}.type")
    if kind:
        if kind in KINDS:
            _loader(reading, kind)
        else:
            hint = nearest(kind, KINDS)
            reading.refuse(f"{LOADER}.type", f"this data set is not here yet{hint}")
    for key in ("train_dataset.seed", f"{LOADER}.config.seed", f"{LOADER}.config.random_seed"):
        if reading.has(key):
            reading.idle(key, SEED_REASON)
    if reading.has(f"{LOADER}.shuffle"):
        reading.idle(f"{LOADER}.shuffle", "samples are drawn in an order of (seed, epoch)")
    _tokenizer(reading)


def _task(reading: Reading) -> None:
    for name in ("train_dataset", "eval_dataset"):
        _copy(reading, name)
    key = "train_dataset_task.type"
    if not reading.has(key):
        return
    if reading.get(key) in TASKS:
        reading.idle(key, "train_dataset applies")
    else:
        reading.refuse(key, "this data set is not here yet")


def _copy(reading: Reading, name: str) -> None:
    """Check ``dataset_config``, the only section that MindFormers reads: it must equal the section next to it."""
    copy = f"{name}_task.dataset_config"
    if reading.get(copy) is None:
        return
    for path, value in leaves(reading.get(copy), path_of(copy)):
        original = ".".join(map(str, (name, *path[2:])))
        if reading.get(original) != value:
            message = f"differs from {original}, which is read here; write the section once, with an anchor"
            reading.note(path, Outcome.REFUSED, reason=message)


def _loader(reading: Reading, loader_type: str) -> None:
    kind = KINDS[loader_type]
    reading.translate(f"{LOADER}.type", f"{LOADER}.type", kind)
    if loader_type == "BlendedMegatronDatasetDataLoader":
        _blend(reading)
        return
    if loader_type == "MindDataset":
        _files(reading, kind, "dataset_dir", "dataset_files")
        # labels stand one place ahead with input_sliced_sig, and in the newer networks, which do not read that key
        key, ours, columns = (
            "model.model_config.input_sliced_sig",
            f"{OURS}.shifted_labels",
            "train_dataset.input_columns",
        )
        newer = reading.get("use_legacy", True) is False
        named = reading.get(columns, [])
        labels = isinstance(named, list) and "labels" in named
        if newer and not labels:
            place = columns if reading.has(columns) else f"{LOADER}.type"
            reading.refuse(
                place, "use_legacy is false: such networks learn from a column labels; name it in input_columns"
            )
        elif newer and reading.get(key) is False:
            reading.put(ours, True, path_of(key))
            reading.idle(key, "use_legacy is false: such networks never shift labels, whatever is written")
        elif newer and not reading.has(key):
            reading.set_omitted(key, ours, True, "use_legacy is false: such networks never shift labels")
        elif reading.get(key) and not labels:
            reading.idle(key, "without a column labels MindFormers shifts in any case")
        elif reading.get(key):
            reading.translate(key, ours, True)
        return
    if loader_type == "ADGenDataLoader":
        _files(reading, kind, "dataset_dir")
        reading.put(f"{OURS}.handler", "ADGenInstructionHandler", ("train_dataset", "data_loader", "type"))
        _columns(reading)
    else:
        _hub_files(reading, kind)
        entries = reading.get(f"{LOADER}.handler", [])
        entries = entries if isinstance(entries, list) else [entries]
        separated = bool(
            reading.get(f"{LOADER}.create_attention_mask") or reading.get(f"{LOADER}.create_compressed_eod_mask")
        )
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                _handler(reading, index, entry, separated)
        for name in ("create_attention_mask", "create_compressed_eod_mask"):
            if reading.has(f"{LOADER}.{name}"):
                reading.idle(
                    f"{LOADER}.{name}", "config.packing decides whether conversations of a sample attend to each other"
                )
        if reading.has(f"{LOADER}.packing"):
            reading.refuse(f"{LOADER}.packing", "write a PackingHandler")


def _files(reading: Reading, kind: str, *names: str) -> None:
    written = [name for name in names if reading.has(f"{LOADER}.{name}")]
    named = [name for name in written if reading.get(f"{LOADER}.{name}")]
    for name in written:
        key = f"{LOADER}.{name}"
        if name in named[:1]:
            reading.translate(key, PATH)
        elif named:
            reading.idle(key, "empty, or named twice")
        else:
            reading.translate(key, PATH, NOT_NAMED[kind], "no file is named: give --train_dataset_dir")
    if not written:
        reading.set_omitted(
            f"{LOADER}.dataset_dir", PATH, NOT_NAMED[kind], "no file is named: give --train_dataset_dir"
        )


def _columns(reading: Reading) -> None:
    key = f"{LOADER}.origin_columns"
    if not reading.has(key):
        return
    if reading.get(key) == ["content", "summary"]:
        reading.translate(key, f"{OURS}.handler", "ADGenInstructionHandler")
    else:
        reading.refuse(key, "rows of AdvertiseGen have content and summary")


def _hub_files(reading: Reading, kind: str) -> None:
    """Translate local files in ``path`` and ``data_files`` of Hugging Face's ``load_dataset``."""
    files, path = f"{LOADER}.data_files", f"{LOADER}.path"
    if reading.get(files):
        reading.translate(files, PATH)
        if reading.has(path):
            reading.idle(path, "data_files names the files; their suffix decides the format")
    elif reading.get(path) and reading.get(path) not in LOADED_NAMES:
        reading.translate(path, PATH, reason="a local file or directory: nothing is downloaded")
    else:
        _files(reading, kind, "dataset_dir")
    split = f"{LOADER}.split"
    if reading.has(split):
        if reading.get(split) == "train":
            reading.idle(split, "the files of data_path are those of training")
        else:
            reading.refuse(split, "write the files of this part as data_path")


def _handler(reading: Reading, index: int, entry: dict[str, Any], separated: bool) -> None:
    place = ("train_dataset", "data_loader", "handler", index)
    kind = entry.get("type")
    if kind == "take":
        reading.note((*place, "type"), Outcome.TRANSLATED, f"{OURS}.max_rows")
        reading.put(f"{OURS}.max_rows", entry.get("n"), (*place, "n"))
        reading.note((*place, "n"), Outcome.TRANSLATED, f"{OURS}.max_rows: {entry.get('n')}")
    elif kind == "PackingHandler":
        packing = True if separated else "joined"
        reading.put(f"{OURS}.packing", packing, (*place, "type"))
        target = f"{OURS}.packing: {'true' if separated else 'joined'}"
        reading.note((*place, "type"), Outcome.TRANSLATED, target, "no mask keeps them apart" * (not separated))
        if "pack_strategy" in entry:
            strategy = entry["pack_strategy"]
            if strategy == "pack":
                reading.note(
                    (*place, "pack_strategy"), Outcome.WITHOUT_EFFECT, reason="whole conversations share a sample"
                )
            else:
                reading.note(
                    (*place, "pack_strategy"), Outcome.REFUSED, reason="conversations are packed whole here (pack)"
                )
    elif kind == "AlpacaInstructDataHandler":
        reading.put(f"{OURS}.handler", "alpaca", (*place, "type"))
        reading.note((*place, "type"), Outcome.TRANSLATED, f"{OURS}.handler: alpaca")
    else:
        reading.note(
            (*place, "type"), Outcome.REFUSED, reason=f"this form of rows is not here{nearest(str(kind), HANDLERS)}"
        )
    if "seq_length" in entry:
        _check_length(reading, (*place, "seq_length"), entry["seq_length"])


def _check_length(reading: Reading, path: tuple, length: Any) -> None:
    """Check that a sequence length equals that of the model; a model without one takes it."""
    model = reading.ours.data.setdefault("model", {}).setdefault("model_config", {})
    if "seq_length" not in model:
        reading.put("model.model_config.seq_length", length, path)
    if model["seq_length"] == length:
        reading.note(path, Outcome.TRANSLATED, f"model.model_config.seq_length: {length}")
    else:
        message = f"model.model_config.seq_length is {model['seq_length']}, and the only sequence length here"
        reading.note(path, Outcome.REFUSED, reason=message)


def _blend(reading: Reading) -> None:
    config = f"{LOADER}.config"
    if reading.get(f"{config}.data_path"):
        reading.use(f"{config}.data_path")
    else:
        key = f"{config}.data_path"
        value, reason = NOT_NAMED["BlendedMegatronDatasetDataLoader"], "no file is named: give --train_dataset_dir"
        if reading.has(key):
            reading.translate(key, PATH, value, reason)
        else:
            reading.set_omitted(key, PATH, value, reason)
    for name in ("split", "eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        if reading.has(f"{config}.{name}"):
            reading.use(f"{config}.{name}")
    if not reading.has(f"{config}.split"):
        reading.set_omitted(f"{config}.split", f"{OURS}.split", "1,0,0", "left out: everything is trained on")
    if reading.get(f"{config}.create_compressed_eod_mask"):
        reading.translate(f"{config}.create_compressed_eod_mask", f"{OURS}.reset_attention_mask", True)
    elif reading.has(f"{config}.create_compressed_eod_mask"):
        reading.idle(f"{config}.create_compressed_eod_mask", "off")
    if reading.has(f"{config}.seq_length"):
        path = ("train_dataset", "data_loader", "config", "seq_length")
        _check_length(reading, path, reading.get(f"{config}.seq_length"))
    _end_of_document(reading, f"{config}.eod")
    # samples of an epoch, as optimizer steps of the run
    key = f"{LOADER}.sizes"
    sizes = reading.get(key)
    if not reading.has(key):
        return
    if reading.has(STEPS):
        reading.idle(key, "how many steps a run has is written")
        return
    samples = sizes[0] if isinstance(sizes, list) and sizes else None
    batch = _global_batch(reading)
    epochs = reading.get("runner_config.epochs", 1)
    if not isinstance(samples, int) or samples < batch or not isinstance(epochs, int):
        reading.refuse(key, f"must begin with the number of training samples, at least a global batch of {batch}")
        return
    steps = samples // batch * epochs
    reading.translate(key, STEPS, steps, f"{samples} samples, batches of {batch}, {epochs} epochs")


def _end_of_document(reading: Reading, key: str) -> None:
    if not reading.has(key):
        return
    config = f"{LOADER}.config"
    counts = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "create_compressed_eod_mask")
    if any(reading.get(f"{config}.{name}") for name in counts):
        reading.translate(key, "model.model_config.eos_token_id", reason="where documents of a sample end")
    else:
        reading.idle(key, "documents of a sample are not kept apart")


def _global_batch(reading: Reading) -> int:
    ours = reading.ours.data
    runner, mesh = ours.get("runner_config", {}), ours.get("parallel_config", {})
    sizes = (
        runner.get("batch_size", 1),
        runner.get("gradient_accumulation_steps", 1),
        mesh.get("data_parallel", 1),
        mesh.get("micro_batch_num", 1),
    )
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def _tokenizer(reading: Reading) -> None:
    """Translate the first readable tokenizer file. The file of the data set takes precedence."""
    keys = (
        "train_dataset.tokenizer.vocab_file",
        "processor.tokenizer.tokenizer_file",
        "processor.tokenizer.vocab_file",
    )
    is_found = False
    for key in filter(reading.has, keys):
        value = reading.get(key)
        name = PurePath(str(value)).name
        if not value:
            reading.idle(key, "empty")
        elif is_found:
            reading.idle(key, "another file is named")
        elif name != "vocab.json" and name.endswith(READABLE):
            reading.translate(key, TOKENIZER)
            is_found = True
        else:
            reading.idle(
                key, "tokenizer.json or tokenizer.model is read here: name it as vocab_file where text is encoded"
            )
    expected = expected_tokenizer(reading)
    if expected and not is_found:
        reason = "expected in pretrained_model_dir when the run starts"
        reading.set_omitted(TOKENIZER, TOKENIZER, expected, reason)
