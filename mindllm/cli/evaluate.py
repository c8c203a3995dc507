"""What ``mindllm evaluate`` does."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.cli.parsers.evaluate import OUTPUT, make_parser
from mindllm.cli.registry import spelled
from mindllm.command import run_command
from mindllm.config.generation import EvaluationConfig
from mindllm.errors import UserError
from mindllm.process.interrupts import interruptible
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import REMAINING, drawn

if TYPE_CHECKING:
    from mindllm.config import RunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluates, prints the table; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, overrides = make_parser().parse_known_args(given)
    named = options.named or options.model
    if bool(named) == bool(options.config) or (options.named and options.model):
        raise UserError(
            f"{spelled('evaluate')}: name a model, as in {spelled('evaluate')} DIR, or --config FILE: one of them"
        )
    if named and not options.tasks:
        raise UserError("--tasks: name what the model is evaluated on, as in --tasks arc_challenge,gsm8k")
    import lm_eval  # noqa: F401  (what is not installed is told before anything is done)

    from mindllm.evaluate.evaluation import evaluate_on_tasks, failure_of
    from mindllm.evaluate.outcome import Scores
    from mindllm.evaluate.report import PAGE, as_json, table
    from mindllm.train.device import prepare_environment, set_up_device

    config, shown = _of_yaml(options, overrides) if options.config else _of_model(named, options, overrides, given)
    directory = Path(config.output_dir)
    with drawn(*REMAINING) as progress:
        prepare_environment(config)
        set_up_device(config)
        with interruptible():
            outcome = evaluate_on_tasks(config, config.eval_tasks, directory, progress=progress)
    if options.json:
        print_json(Scores(as_json(outcome, shown)).to_dict())
    elif outcome.results["results"]:
        output.print(table(outcome))
    error_console.print(f"results, and the wrong answers in {PAGE}: {directory}")
    if outcome.failures:
        raise failure_of(outcome.failures)
    return 0


def _of_yaml(options: argparse.Namespace, overrides: list[str]) -> tuple[RunConfig, str]:
    """The evaluation that a YAML describes, with what the command line says otherwise; and the name of its model."""
    from mindllm.config import load_config, on_this_device, override_config

    asked = {f"evaluation.{key}": value for key, value in _evaluation(options).items()}
    tasks = {"eval_tasks": options.tasks} if options.tasks else {}
    place = {"output_dir": str(options.output)} if options.output else {}
    config = override_config(load_config(options.config, overrides), {"run_mode": "eval", **asked, **tasks, **place})
    if not config.eval_tasks:
        raise config.error("eval_tasks", "names no task; give --tasks arc_challenge,gsm8k")
    config, said = on_this_device(config)
    if said:
        error_console.print(said)
    return config, config.load_checkpoint


def _of_model(
    named: Path, options: argparse.Namespace, overrides: list[str], given: Sequence[str]
) -> tuple[RunConfig, str]:
    """The evaluation of a model that a person names, whose YAML is written; and its name."""
    from mindllm.recipes.model_source import find_model
    from mindllm.recipes.using import evaluate_recipe

    model = find_model(named, options.base)
    for note in model.notes():
        error_console.print(note)
    directory = options.output or Path(OUTPUT)
    recipe = evaluate_recipe(
        model, shlex.join(["mindllm", "evaluate", *given]), directory, options.tasks, _evaluation(options)
    )
    asked = [f"--processor.tokenizer.vocab_file={options.tokenizer}"] if options.tokenizer else []
    asked += [f"--model.model_config.seq_length={options.max_length}"] if options.max_length else []
    made = recipe.made([*asked, *overrides])
    file = made.config.processor.tokenizer.vocab_file
    if not file or not Path(file).exists():
        where = f"{file} is not there any more" if file else "it names none"
        raise UserError(f"{named}: no tokenizer, {where}; give --tokenizer FILE")
    made.write(place := directory / "evaluate.yaml")
    error_console.print(f"every choice, and why: {place} (again: mindllm evaluate --config {place})")
    return made.config, str(named)


def _evaluation(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the section ``evaluation``."""
    given = {name: getattr(options, name) for name in EvaluationConfig.model_fields}
    return {name: value for name, value in given.items() if value is not None}


if __name__ == "__main__":
    run_command(main)
