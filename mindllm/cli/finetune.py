"""``mindllm finetune`` and ``mindllm pretrain``: their options, how they come to a run, and what is said when it has ended.

The run is made from a model and data, by a YAML beside the output; or it is that of a YAML.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.run_options import DESCRIPTIONS, KEYS, LAST, with_mode
from mindllm.command import CommandParser, output_directory, positive
from mindllm.errors import UserError
from mindllm.jobs.memory import add_memory_option
from mindllm.process.interrupts import INTERRUPTED
from mindllm.shorthands import SHORTHANDS
from mindllm.units import counted

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.recipes.recipe import MadeRun

FINETUNE, PRETRAIN = "finetune", "pretrain"
METHODS = ("lora", "dora", "qlora", "dpo", "kto", "adalora", "adapter", "llamapro", "full", "galore", "lisa")
"""Of mindllm.recipes.rates."""
TEXT = {
    FINETUNE: DESCRIPTIONS[FINETUNE]
    + " What nobody says is chosen by model, data and machine, and written down with reasons.",
    PRETRAIN: "Trains a model of a known network from new weights on text. What nobody says is chosen by network, text and "
    "machine, and written down with reasons.",
}
USAGE = {FINETUNE: "MODEL DATA [--method M]", PRETRAIN: "--like MODEL TEXT [--tokenizer FILE]"}
EXAMPLES = {
    FINETUNE: f"""
  %(prog)s models/SmolLM2-135M-Instruct chats.jsonl
  %(prog)s models/SmolLM2-135M-Instruct chats.jsonl --method dora --epochs 2 --output output/mine
  %(prog)s models/SmolLM2-135M-Instruct pairs.jsonl --method dpo
  %(prog)s models/SmolLM2-135M-Instruct answers.jsonl --method kto
  %(prog)s --config output/mine/finetune.yaml --overwrite
  %(prog)s --config configs/llama2/finetune_llama2_tiny.yaml --load_checkpoint {LAST}
""",
    PRETRAIN: """
  %(prog)s --like qwen2_5_0_5b corpus.jsonl --tokenizer models/qwen/tokenizer.json
  %(prog)s --like models/SmolLM2-135M-Instruct texts/ --output output/mine
  %(prog)s --config output/mine/pretrain.yaml --resume_training
""",
}
OUTPUT = Path("output")
MODES = {FINETUNE: "finetune", PRETRAIN: "train"}
RESULTS = ("overwrite", "resume_training")  # what becomes of a run that is there: of one start, not of a YAML
NEEDS = {
    FINETUNE: "a model and data as words, without --model or --data: mindllm finetune DIR chats.jsonl",
    PRETRAIN: "a network and text, as in mindllm pretrain --like DIR corpus.jsonl",
}
STARTED = "MS_WORKER_NUM"  # by a launcher, in the environment of its processes


def make_parser(verb: str) -> CommandParser:
    """Return the parser of ``finetune`` or ``pretrain``."""
    prog = f"mindllm {verb}"
    shorthands = "\n".join(f"  --{short} = --{full}" for short, full in SHORTHANDS.items() if short != "epochs")
    parser = CommandParser(
        prog=prog,
        takes_keys=True,
        usage=f"{prog} {USAGE[verb]} [--output DIR] [--section.key=value ...]\n"
        f"       {prog} --config FILE [--section.key=value ...]",
        description=TEXT[verb],
        epilog=f"shorthands:\n{shorthands}\n\nexamples:{EXAMPLES[verb]}{KEYS}",
    )
    _add_finetune(parser) if verb == FINETUNE else _add_pretrain(parser)
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML of a run instead: also one that this command has written")
    add("--output", type=output_directory, metavar="DIR", help="directory of the run (default: output/NAME)")
    add("--epochs", type=positive, metavar="N", help="passes over the data (default: by its size)")
    add("--print_config", action="store_true", help="print the resolved YAML and exit")
    add_memory_option(parser)
    return parser


def _add_finetune(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, checkpoint or output of a run",
    )
    data = "conversations, pairs of answers or labelled answers: .jsonl, .json, .csv, .parquet, or a directory (docs/data.md)"
    add("data", nargs="*", type=Path, metavar="DATA", help=data)
    add(
        "--method",
        choices=METHODS,
        help="how the model is changed (default: lora; of pairs dpo; of answers with a label kto; of codes qlora)",
    )
    add("--skip_bad_rows", action="store_true", help="leave out rows that cannot be used")


def _add_pretrain(parser: CommandParser) -> None:
    add = parser.add_argument
    add("data", nargs="*", type=Path, metavar="TEXT", help="text: .jsonl with text, .txt, or a directory of files")
    add(
        "--like",
        metavar="MODEL",
        help="the network: a shipped name (qwen2_5_0_5b), a directory, its config.json, or a GGUF file",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer (default: that of the directory, or one is trained)")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of a record that are its text (text)")
    add(
        "--format", choices=("auto", "text"), default="auto", help="text: every file is one document, whatever its name"
    )


def read_learning(arguments: Sequence[str] | None, verb: str) -> tuple[Namespace, RunConfig]:
    """Return the options of the command line and the run that they mean; its YAML is written.

    Raises:
        UserError: no model or data, or none that is one; rows that cannot be used; another run in the output directory.
    """
    given = list(sys.argv[2:] if arguments is None else arguments)
    options, rest = make_parser(verb).parse_known_args(given)
    options.data += [Path(word) for word in rest if not word.startswith("-")]  # behind options
    overrides = with_mode([word for word in rest if word.startswith("-")], MODES[verb])
    model = options.model if verb == FINETUNE else options.like
    if options.config:
        return options, _of_yaml(options, verb, model, overrides)
    if not model or not options.data:
        raise UserError(f"mindllm {verb}: name {NEEDS[verb]}; or --config FILE")
    command = shlex.join(["mindllm", verb, *given])
    made = _finetune(options, overrides, command) if verb == FINETUNE else _pretrain(options, overrides, command)
    return options, _written(made, options, verb)


def _of_yaml(options: Namespace, verb: str, model: object, overrides: list[str]) -> RunConfig:
    """The run of ``--config``; what chooses for a model contradicts it."""
    from mindllm.config import load_config

    choosing = {"MODEL": model, "DATA": options.data, "--method": getattr(options, "method", None)}
    choosing |= {"--tokenizer": getattr(options, "tokenizer", None)}
    for name, value in choosing.items():
        if value:
            raise UserError(f"mindllm {verb}: --config has all of a run already, leave out {name}; change its keys")
    extra = [f"--runner_config.epochs={options.epochs}"] * bool(options.epochs)
    extra += [f"--output_dir={options.output}"] * bool(options.output)
    extra += ["--train_dataset.data_loader.config.skip_bad_rows=true"] * bool(getattr(options, "skip_bad_rows", False))
    return load_config(options.config, [*overrides, *extra])


def _finetune(options: Namespace, overrides: list[str], command: str) -> MadeRun:
    from mindllm.recipes.model_source import find_model
    from mindllm.recipes.rates import UNPAIRED
    from mindllm.recipes.survey import survey
    from mindllm.recipes.tuning import Tuning, chat_keys, finetune_recipe, method_for
    from mindllm.terminal.console import error_console
    from mindllm.terminal.render import passing

    model = find_model(options.model)
    if not model.tokenizer:
        raise UserError(f"{options.model}: has no tokenizer; copy tokenizer.json from where the model comes from")
    for note in model.notes():
        error_console.print(note)
    with passing() as progress:
        unpaired = options.method == UNPAIRED
        found = survey(
            options.data,
            model.tokenizer,
            skip_bad_rows=options.skip_bad_rows,
            chat=chat_keys(overrides),
            unpaired=unpaired,
            progress=progress,
        )
    method = method_for(model, found.loader, options.method or "", found.labelled)
    output = options.output or _asked_output(overrides) or OUTPUT / f"{model.name}-{method}"
    options.output = output
    tuning = Tuning(model, found, method, output, tuple(overrides), options.epochs, options.skip_bad_rows)
    for note in tuning.notes():
        error_console.print(note)
    return finetune_recipe(tuning, command).made(overrides)


def _pretrain(options: Namespace, overrides: list[str], command: str) -> MadeRun:
    from mindllm.config import load_config
    from mindllm.recipes.corpus import look_at_text, prepare_text, size_of
    from mindllm.recipes.network import find_network
    from mindllm.recipes.pretraining import Pretraining, pretrain_recipe, vocabulary
    from mindllm.terminal.console import error_console
    from mindllm.terminal.render import passing

    network = find_network(options.like)
    tokenizer = options.tokenizer or network.tokenizer
    size = vocabulary(network, size_of(options.data))
    options.output = options.output or _asked_output(overrides) or OUTPUT / f"{network.name}-pretrain"
    early = load_config(network.tree(options.output), _about_results(overrides))
    if not options.print_config:
        _refuse_another_run(early)  # before hours go into text
    with passing() as progress:
        text = (look_at_text if options.print_config else prepare_text)(
            options.data,
            options.output,
            tokenizer,
            size,
            keys=options.json_keys,
            as_text=options.format == "text",
            progress=progress,
        )
    if text.trained:
        would = "has" if text.tokenizer_file.is_file() else "would have"
        error_console.print(
            f"no tokenizer was given: {text.tokenizer_file} {would} {text.tokenizer.vocab_size} tokens of this text"
        )
    error_console.print(f"text: {text.prefix}: {text.describe()}")
    run = Pretraining(network, text, options.output, tuple(overrides), options.epochs)
    return pretrain_recipe(run, command).made(overrides)


def _asked_output(overrides: Sequence[str]) -> Path | None:
    return next((Path(word.partition("=")[2]) for word in overrides if word.startswith("--output_dir=")), None)


def _about_results(overrides: Sequence[str]) -> list[str]:
    """Options that say what becomes of a run that is there already, which no YAML repeats."""
    return [option for option in overrides if option.partition("=")[0] in ("--overwrite", "--resume_training")]


def _refuse_another_run(config: RunConfig) -> None:
    """Before the YAML is written: that of a run which trains there, or has trained, stays as it is."""
    from mindllm.train.job.output_directory import require_no_results, require_unlocked

    require_no_results(config)
    if STARTED not in os.environ:  # ranks of one job come at once, and the first one claims the directory for all
        require_unlocked(Path(config.output_dir))


def _written(made: MadeRun, options: Namespace, verb: str) -> RunConfig:
    """Write the YAML and read the run from it, so that what is wrong later is told by its lines."""
    from mindllm.config import load_config
    from mindllm.terminal.console import error_console

    if options.print_config:
        return made.config
    _refuse_another_run(made.config)
    place = options.output / f"{verb}.yaml"
    made.without(RESULTS).write(place)
    for line in summary(made.config):
        error_console.print(line)
    error_console.print(f"every choice, and why: {place} (again: mindllm {verb} --config {shlex.quote(str(place))})")
    return load_config(place, {key: getattr(made.config, key) for key in RESULTS})


def summary(config: RunConfig) -> list[str]:
    """Return what is most worth knowing of a run before it begins."""
    runner, model = config.runner_config, config.model.config
    tuner = model.pet_config.pet_type if model.pet_config is not None else "all weights"
    rate = config.lr_schedule.learning_rate if config.lr_schedule else None
    devices = config.parallel_config.data_parallel
    parts = f" in {runner.gradient_accumulation_steps} parts" if runner.gradient_accumulation_steps > 1 else ""
    spread = f" on {devices} devices" if devices > 1 else ""
    return [
        f"{tuner}, learning rate {rate:g}; {config.global_batch_size} rows of {model.seq_length} tokens a step"
        f"{parts}{spread}, {counted(runner.epochs, 'epoch')}"
    ]


def launch_line(config: RunConfig, verb: str) -> str:
    """Return the command that starts a process for each device; empty where there is one, or a launcher has started this."""
    devices = config.parallel_config.device_num
    if devices == 1 or config.context.device_target == "CPU" or STARTED in os.environ:
        return ""
    words = shlex.quote(f"{verb} --config {shlex.quote(str(config.source))}")
    return f"{devices} devices, each with a process of its own: mindllm launch --workers {devices} {words}"


def afterwards(config: RunConfig, verb: str, code: int) -> Iterator[str]:
    """Yield what to do with a run that has ended with an exit code: nothing where it has left no checkpoint."""
    from mindllm.train.checkpoint import CheckpointStore
    from mindllm.train.job.output_directory import CHECKPOINTS

    output = Path(config.output_dir)
    newest = CheckpointStore(output / CHECKPOINTS).newest()
    if newest is None or code not in (0, INTERRUPTED):
        return
    run, last = shlex.quote(_shown(output)), shlex.quote(_shown(newest))
    if code == INTERRUPTED:
        if config.source is not None:
            yield f"go on: mindllm {verb} --config {shlex.quote(_shown(config.source))} --resume_training"
        return
    yield f"talk to it: mindllm chat {run}" if verb == "finetune" else f'try it: mindllm generate {run} --prompt "…"'
    pet = config.model.config.pet_config
    if pet is None or pet.tuner.of_all_weights:
        yield f"as a Hugging Face directory: mindllm weights export {last} DIR"
        return
    if pet.tuner.low_rank or pet.tuner.own_format:
        yield f"the adapter as files{' of PEFT' * pet.tuner.low_rank}: mindllm weights adapter {last} DIR"
    if not pet.tuner.own_format:
        yield f"with its base as a Hugging Face directory: mindllm weights merge {last} DIR"


def _shown(path: Path) -> str:
    """A path below the working directory as it is typed there."""
    whole, here = path.resolve(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)
