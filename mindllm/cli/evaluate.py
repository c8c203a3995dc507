"""``mindllm evaluate``: score a model on tasks such as mmlu."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.command import CommandParser, output_directory, positive, run_command
from mindllm.errors import UserError
from mindllm.process.interrupts import interruptible
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import REMAINING, drawn

if TYPE_CHECKING:
    from mindllm.config import RunConfig

EXAMPLE = """examples:
  %(prog)s models/llama3-8b --tasks mmlu,arc_challenge --num_fewshot 5 --limit 100
  %(prog)s output/llama2_tiny/checkpoint/llm-400 --tasks boolq --data /data/hub --json
  %(prog)s models/chat --tasks gsm8k --apply_chat_template --gen_kwargs max_gen_toks=512
  %(prog)s --config output_evaluate/evaluate.yaml

Data sets are read from --data, in the layout of the hub (cais/mmlu lies in DATA/cais/mmlu); nothing is downloaded. Tasks are
those of lm-evaluation-harness (python -m lm_eval ls tasks) and our own, modellink_*. An evaluation that was interrupted goes on
where it was. What was chosen is written to OUTPUT/evaluate.yaml, which --config repeats.
Exit codes: 0 good, 1 a task failed, 2 wrong input, 130 interrupted.
"""
OUTPUT = "output_evaluate"
DATA, BATCH_SIZE = "./eval_data", 8  # defaults of mindllm.config.generation


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog="mindllm evaluate",
        takes_keys=True,
        description="Evaluates a Hugging Face directory or a checkpoint with lm-evaluation-harness.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add(
        "named",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, checkpoint, run or adapter",
    )
    add("--model", type=Path, metavar="PATH", help="the same, as an option")
    add("--base", type=Path, metavar="DIR", help="weights of an adapter whose own file does not find them")
    add("--config", metavar="FILE", help="YAML of an evaluation, in place of MODEL and --tasks")
    add("--tasks", type=_names, metavar="A,B", help="tasks, or groups of them, separated by commas")
    add("--data", metavar="DIR", help=f"directory of data sets (default {DATA})")
    add("--limit", type=positive, metavar="N", help="questions of each task (default all)")
    add("--num_fewshot", type=int, metavar="K", help="solved examples before a question (default what the task says)")
    add("--batch_size", type=positive, metavar="B", help=f"texts at once ({BATCH_SIZE})")
    add("--max_length", type=positive, metavar="L", help="most tokens of a text (default the model's)")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer (default that of the model)")
    add(
        "--apply_chat_template",
        action="store_true",
        default=None,
        help="ask as in a conversation, examples as its turns",
    )
    add("--gen_kwargs", type=_pairs, metavar="K=V,…", help="options of what the model writes")
    add("--include_path", metavar="DIR", help="directory of more tasks, as YAMLs of the harness")
    add(
        "--confirm_run_unsafe_code",
        action="store_true",
        default=None,
        help="run code that the model writes (HumanEval), or that tasks of --include_path name",
    )
    add("--log_samples", action="store_true", default=None, help="write every question with its answer")
    add(
        "--output",
        type=output_directory,
        metavar="DIR",
        help=f"directory for results (default {OUTPUT}; with --config that of the YAML)",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("names no task")
    return names


def _pairs(text: str) -> dict[str, Any]:
    """``a=1,b=x`` as a mapping; values are read as YAML would."""
    import yaml

    found = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise argparse.ArgumentTypeError(f"{part}: write name=value")
        found[name.strip()] = yaml.safe_load(value)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluates, prints the table; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, overrides = make_parser().parse_known_args(given)
    named = options.named or options.model
    if bool(named) == bool(options.config) or (options.named and options.model):
        raise UserError("mindllm evaluate: name a model, as in mindllm evaluate DIR, or --config FILE: one of them")
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
    error_console.print(f"every choice, and why: {place} (again: mindllm evaluate --config {shlex.quote(str(place))})")
    return made.config, str(named)


def _evaluation(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the section ``evaluation``."""
    from mindllm.config.generation import EvaluationConfig

    given = {name: getattr(options, name) for name in EvaluationConfig.model_fields}
    return {name: value for name, value in given.items() if value is not None}


if __name__ == "__main__":
    run_command(main)
