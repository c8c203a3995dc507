"""``mindllm train``, ``mindllm finetune`` and ``mindllm pretrain``: train the run of a YAML, or of a model and data.

For a model and data, the settings are chosen and written as a YAML next to the output.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.run import LAST, TINY, add_print_config, print_config, run, run_epilog, with_mode
from mindllm.command import CommandParser, output_directory, positive
from mindllm.errors import UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.process.interrupts import INTERRUPTED, receive_interrupts
from mindllm.terminal.console import error_console
from mindllm.units import counted

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.recipes.recipe import MadeRun

TRAIN, FINETUNE, PRETRAIN = "train", "finetune", "pretrain"
METHODS = ("lora", "dora", "qlora", "dpo", "kto", "adalora", "adapter", "llamapro", "full", "galore", "lisa")
"""Those of mindllm.recipes.rates."""
DESCRIPTIONS = {
    TRAIN: "Trains a model, from scratch or from a checkpoint.",
    FINETUNE: "Fine-tunes a model: all weights or an adapter. Settings that are not given are chosen by model, data and "
    "machine, and written as a YAML with a reason for each.",
    PRETRAIN: "Trains a known network on text from scratch. Settings that are not given are chosen by network, text and "
    "machine, and written as a YAML with a reason for each.",
}
USAGE = {
    TRAIN: "RUN",
    FINETUNE: "MODEL DATA ...|RUN [--method M]",
    PRETRAIN: "--like MODEL TEXT ...|RUN [--tokenizer FILE]",
}
EXAMPLES = {
    TRAIN: f"""
  %(prog)s {TINY}
  %(prog)s {TINY} --resume_training auto
  %(prog)s {TINY} --batch-size 4 --print-config
""",
    FINETUNE: f"""
  %(prog)s models/SmolLM2-135M-Instruct chats.jsonl
  %(prog)s models/SmolLM2-135M-Instruct chats.jsonl --method dora --epochs 2 --output output/mine
  %(prog)s models/SmolLM2-135M-Instruct pairs.jsonl --method dpo
  %(prog)s models/SmolLM2-135M-Instruct answers.jsonl --method kto
  %(prog)s output/mine/finetune.yaml --overwrite
  %(prog)s configs/llama2/finetune_llama2_tiny.yaml --load_checkpoint {LAST}
""",
    PRETRAIN: """
  %(prog)s --like qwen2_5_0_5b corpus.jsonl --tokenizer models/qwen/tokenizer.json
  %(prog)s --like models/SmolLM2-135M-Instruct texts/ --output output/mine
  %(prog)s output/mine/pretrain.yaml --resume_training
""",
}
OUTPUT = Path("output")
MODES = {TRAIN: "train", FINETUNE: "finetune", PRETRAIN: "train"}
START_KEYS = ("overwrite", "resume_training")  # keys of one start, which the YAML of a run does not repeat
MISSING = {
    FINETUNE: "model or data are missing (arguments, not --model or --data); example: mindllm finetune DIR chats.jsonl",
    PRETRAIN: "network or text is missing; example: mindllm pretrain --like DIR corpus.jsonl",
}
LAUNCHED = "MS_WORKER_NUM"  # variable of a launcher in the environment of its processes


def make_parser(verb: str) -> CommandParser:
    """Return the parser of ``train``, ``finetune`` or ``pretrain``."""
    prog = f"mindllm {verb}"
    parser = CommandParser(
        prog=prog,
        takes_keys=True,
        usage=f"{prog} {USAGE[verb]} [options]",
        description=DESCRIPTIONS[verb],
        epilog=run_epilog(EXAMPLES[verb]),
    )
    add = parser.add_argument
    if verb == TRAIN:
        parser.add_run()
        add_print_config(parser)
        return parser
    _add_finetune(parser) if verb == FINETUNE else _add_pretrain(parser)
    add("--output", type=output_directory, metavar="DIR", help="output directory of the run (default: output/NAME)")
    add("--epochs", type=positive, metavar="N", help="passes over the data (default: chosen by its size)")
    add_print_config(parser)
    add_memory_option(parser)
    return parser


def _add_finetune(parser: CommandParser) -> None:
    add = parser.add_argument
    model = "Hugging Face directory, GGUF file, checkpoint or output directory of a run; or a YAML, without DATA"
    add("model", nargs="?", type=Path, metavar="MODEL|RUN", help=model)
    data = (
        "conversations, answer pairs or labeled answers: .jsonl, .json, .csv, .parquet, or a directory (docs/data.md)"
    )
    add("data", nargs="*", type=Path, metavar="DATA", help=data)
    method = (
        "training method (default: lora; dpo for answer pairs, kto for labeled answers, qlora for quantized models)"
    )
    add("--method", choices=METHODS, help=method)
    add("--skip-bad-rows", action="store_true", help="skip invalid rows")


def _add_pretrain(parser: CommandParser) -> None:
    add = parser.add_argument
    text = "text: .jsonl with text, .txt, or a directory of files; or the YAML of a run"
    add("data", nargs="*", type=Path, metavar="TEXT|RUN", help=text)
    like = "network: a shipped name (qwen2_5_0_5b), a model directory, its config.json, or a GGUF file"
    add("--like", metavar="MODEL", help=like)
    tokenizer = "tokenizer (default: that of the model directory; without one, train a tokenizer)"
    add("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="text keys of a record (default: text)")
    add("--format", choices=("auto", "text"), default="auto", help="text: read every file as one document")


def main(arguments: Sequence[str] | None, verb: str) -> int:
    """Train, and print the next steps; return the exit code. Several devices are started by the launcher."""

    receive_interrupts()
    options, config = read_train(arguments, verb)
    if options.print_config:
        return print_config(config)
    if verb == TRAIN:
        return run(config)
    if line := launch_line(config, verb):
        error_console.print(line)
        return 0
    code = run(config)
    for line in next_steps(config, verb, code):
        error_console.print(line)
    return code


def read_train(arguments: Sequence[str] | None, verb: str) -> tuple[Namespace, RunConfig]:
    """Return the options of the command line and their run; for a model and data, write its YAML.

    Raises:
        UserError: model, data or rows are missing or invalid, or the output directory holds another run.
    """
    from mindllm.config import load_config

    words = list(sys.argv[2:] if arguments is None else arguments)
    options, rest = make_parser(verb).parse_known_args(words)
    if verb == TRAIN:
        return options, load_config(options.run, with_mode(rest, MODES[verb]))
    options.data += [Path(word) for word in rest if not word.startswith("-")]  # data after options
    overrides = with_mode([word for word in rest if word.startswith("-")], MODES[verb])
    model = options.model if verb == FINETUNE else options.like
    named = options.model if verb == FINETUNE else next(iter(options.data), None)
    if named is not None and named.suffix in (".yaml", ".yml"):
        others = {"DATA": options.data} if verb == FINETUNE else {"TEXT": options.data[1:], "--like": options.like}
        return options, _load_run(named, options, verb, others, overrides)
    if not model or not options.data:
        raise UserError(f"mindllm {verb}: {MISSING[verb]}")
    command = shlex.join(["mindllm", verb, *words])
    made = _finetune(options, overrides, command) if verb == FINETUNE else _pretrain(options, overrides, command)
    return options, _write_run(made, options, verb)


def _load_run(path: Path, options: Namespace, verb: str, others: dict[str, object], overrides: list[str]) -> RunConfig:
    """Load the run of a YAML; refuse options that choose settings for a model."""
    from mindllm.config import load_config

    choosing = {
        **others,
        "--method": getattr(options, "method", None),
        "--tokenizer": getattr(options, "tokenizer", None),
    }
    for name, value in choosing.items():
        if value:
            raise UserError(
                f"mindllm {verb}: {name} contradicts {path}; remove it, and override keys of the YAML instead"
            )
    keys = [f"--runner_config.epochs={options.epochs}"] * bool(options.epochs)
    keys += [f"--output_dir={options.output}"] * bool(options.output)
    keys += ["--train_dataset.data_loader.config.skip_bad_rows=true"] * bool(getattr(options, "skip_bad_rows", False))
    return load_config(path, [*overrides, *keys])


def _finetune(options: Namespace, overrides: list[str], command: str) -> MadeRun:
    from mindllm.recipes.model_source import find_model
    from mindllm.recipes.rates import UNPAIRED
    from mindllm.recipes.survey import survey
    from mindllm.recipes.tuning import Tuning, chat_keys, finetune_recipe, method_for
    from mindllm.terminal.render import passing

    model = find_model(options.model)
    if not model.tokenizer:
        raise UserError(f"{options.model}: the tokenizer is missing; copy tokenizer.json from the source of the model")
    for note in model.notes():
        error_console.print(note)
    with passing() as progress:
        rows = survey(
            options.data,
            model.tokenizer,
            skip_bad_rows=options.skip_bad_rows,
            chat=chat_keys(overrides),
            unpaired=options.method == UNPAIRED,
            progress=progress,
        )
    method = method_for(model, rows.loader, options.method or "", rows.labelled)
    options.output = options.output or _output_key(overrides) or OUTPUT / f"{model.name}-{method}"
    tuning = Tuning(model, rows, method, options.output, tuple(overrides), options.epochs, options.skip_bad_rows)
    for note in tuning.notes():
        error_console.print(note)
    return finetune_recipe(tuning, command).made(overrides)


def _pretrain(options: Namespace, overrides: list[str], command: str) -> MadeRun:
    from mindllm.config import load_config
    from mindllm.recipes.corpus import look_at_text, prepare_text, size_of
    from mindllm.recipes.network import find_network
    from mindllm.recipes.pretraining import Pretraining, pretrain_recipe, vocabulary
    from mindllm.terminal.render import passing

    network = find_network(options.like)
    vocab_size = vocabulary(network, size_of(options.data))
    options.output = options.output or _output_key(overrides) or OUTPUT / f"{network.name}-pretrain"
    if not options.print_config:  # refuse before the text is tokenized, which may take hours
        start = [word for word in overrides if word.partition("=")[0].removeprefix("--") in START_KEYS]
        _refuse_other_run(load_config(network.tree(options.output), start))
    with passing() as progress:
        text = (look_at_text if options.print_config else prepare_text)(
            options.data,
            options.output,
            options.tokenizer or network.tokenizer,
            vocab_size,
            keys=options.json_keys,
            as_text=options.format == "text",
            progress=progress,
        )
    if text.trained:
        action = "trained" if text.tokenizer_file.is_file() else "would train"
        error_console.print(f"no tokenizer: {action} {text.tokenizer_file} with {text.tokenizer.vocab_size} tokens")
    error_console.print(f"text: {text.prefix}: {text.describe()}")
    pretraining = Pretraining(network, text, options.output, tuple(overrides), options.epochs)
    return pretrain_recipe(pretraining, command).made(overrides)


def _output_key(overrides: Sequence[str]) -> Path | None:
    return next((Path(word.partition("=")[2]) for word in overrides if word.startswith("--output_dir=")), None)


def _refuse_other_run(config: RunConfig) -> None:
    """Raise UserError if another run trains, or has trained, in the output directory."""
    from mindllm.train.job.output_directory import require_no_results, require_unlocked

    require_no_results(config)
    if LAUNCHED not in os.environ:  # the first rank of a job claims the directory for all of them
        require_unlocked(Path(config.output_dir))


def _write_run(made: MadeRun, options: Namespace, verb: str) -> RunConfig:
    """Write the YAML of a run and load it, so that later errors name its lines."""
    from mindllm.config import load_config

    if options.print_config:
        return made.config
    _refuse_other_run(made.config)
    path = options.output / f"{verb}.yaml"
    made.without(START_KEYS).write(path)
    error_console.print(summary(made.config))
    error_console.print(f"settings and reasons: {path} (repeat: mindllm {verb} {shlex.quote(str(path))})")
    return load_config(path, {key: getattr(made.config, key) for key in START_KEYS})


def summary(config: RunConfig) -> str:
    """Return the main settings of a run in one line."""
    runner, model = config.runner_config, config.model.config
    tuner = model.pet_config.pet_type if model.pet_config is not None else "all weights"
    rate = config.lr_schedule.learning_rate if config.lr_schedule else None
    devices = config.parallel_config.data_parallel
    micro = f" in {runner.gradient_accumulation_steps} micro-batches" if runner.gradient_accumulation_steps > 1 else ""
    replicas = f" on {devices} devices" if devices > 1 else ""
    return (
        f"{tuner}, learning rate {rate:g}, {config.global_batch_size} rows of {model.seq_length} tokens per step"
        f"{micro}{replicas}, {counted(runner.epochs, 'epoch')}"
    )


def launch_line(config: RunConfig, verb: str) -> str:
    """Return the command that starts a process per device; empty for one device, and in a process of a launcher."""
    devices = config.parallel_config.device_num
    if devices == 1 or config.context.device_target == "CPU" or LAUNCHED in os.environ:
        return ""
    words = shlex.quote(f"{verb} --config {shlex.quote(str(config.source))}")
    return f"the run uses {devices} devices; start it with: mindllm launch --workers {devices} {words}"


def next_steps(config: RunConfig, verb: str, code: int) -> Iterator[str]:
    """Yield commands for the result of a run that ended with an exit code; none without a checkpoint."""
    from mindllm.train.checkpoint import CheckpointStore
    from mindllm.train.job.output_directory import CHECKPOINTS

    output = Path(config.output_dir)
    newest = CheckpointStore(output / CHECKPOINTS).newest()
    if newest is None or code not in (0, INTERRUPTED):
        return
    directory, checkpoint = shlex.quote(_relative(output)), shlex.quote(_relative(newest))
    if code == INTERRUPTED:
        if config.source is not None:
            yield f"resume: mindllm {verb} {shlex.quote(_relative(config.source))} --resume_training"
        return
    yield (
        f"chat: mindllm chat {directory}"
        if verb == FINETUNE
        else f'generate: mindllm generate {directory} --prompt "…"'
    )
    pet = config.model.config.pet_config
    if pet is None or pet.tuner.of_all_weights:
        yield f"export as a Hugging Face directory: mindllm weights export {checkpoint} DIR"
        return
    if pet.tuner.low_rank or pet.tuner.own_format:
        yield f"export the adapter{' for PEFT' * pet.tuner.low_rank}: mindllm weights adapter {checkpoint} DIR"
    if not pet.tuner.own_format:
        yield f"merge with the base into a Hugging Face directory: mindllm weights merge {checkpoint} DIR"


def _relative(path: Path) -> str:
    """Return a path below the working directory relative to it, and any other path in full."""
    resolved, directory = path.resolve(), Path.cwd()
    return str(resolved.relative_to(directory)) if resolved.is_relative_to(directory) else str(resolved)
