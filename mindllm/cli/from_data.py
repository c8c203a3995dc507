"""How ``mindllm finetune`` and ``mindllm pretrain`` come to their run: from a model and data, by a YAML beside the output."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.parsers.learning import FINETUNE, PRETRAIN, make_parser
from mindllm.cli.parsers.run import with_mode
from mindllm.errors import UserError
from mindllm.units import counted

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.recipes.recipe import MadeRun

OUTPUT = Path("output")
MODES = {FINETUNE: "finetune", PRETRAIN: "train"}
RESULTS = ("overwrite", "resume_training")  # what becomes of a run that is there: of one start, not of a YAML
NEEDS = {
    FINETUNE: "a model and data, as in mindllm finetune DIR chats.jsonl",
    PRETRAIN: "a network and text, as in mindllm pretrain --like DIR corpus.jsonl",
}


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
    from mindllm.recipes.tuning import Tuning, finetune_recipe, method_for
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
            options.data, model.tokenizer, skip_bad_rows=options.skip_bad_rows, unpaired=unpaired, progress=progress
        )
    method = method_for(model, found.loader, options.method or "", found.labelled)
    output = options.output or _asked_output(overrides) or OUTPUT / f"{model.name}-{method}"
    options.output = output
    tuning = Tuning(model, found, method, output, tuple(overrides), options.epochs, options.skip_bad_rows)
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
    from mindllm.train.job.output_directory import refuse_results

    refuse_results(config)


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
    error_console.print(f"every choice, and why: {place} (again: mindllm {verb} --config {place})")
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
