"""``mindllm evaluate``: the held-out loss of a run, or scores of a model on tasks such as mmlu."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.cli.run import KEYS, LAST, TINY, add_print_config, print_config, run, with_mode
from mindllm.command import CommandParser, output_directory, positive, run_command
from mindllm.errors import UserError
from mindllm.process.interrupts import interruptible, receive_interrupts
from mindllm.terminal.console import error_console, output, print_json
from mindllm.terminal.render import REMAINING, drawn

if TYPE_CHECKING:
    from mindllm.config import RunConfig

EXAMPLE = f"""examples:
  %(prog)s {TINY} --load_checkpoint {LAST}
  %(prog)s models/llama3-8b --tasks mmlu,arc_challenge --num-fewshot 5 --limit 100
  %(prog)s output/llama2_tiny/checkpoint/llm-400 --tasks boolq --data /data/hub --json
  %(prog)s models/chat --tasks gsm8k --apply-chat-template --gen-kwargs max_gen_toks=512
  %(prog)s output_evaluate/evaluate.yaml

Without tasks, the loss and perplexity of a run on held-out data are computed. Tasks are those of lm-evaluation-harness
(python -m lm_eval ls tasks) and modellink_*. Data sets are read from --data, in the layout of the hub (cais/mmlu in
DATA/cais/mmlu); nothing is downloaded. An interrupted evaluation continues. The settings are written to
OUTPUT/evaluate.yaml, which is a run.
{KEYS}"""
OUTPUT = "output_evaluate"
DATA, BATCH_SIZE = "./eval_data", 8  # defaults of mindllm.config.generation


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm evaluate",
        takes_keys=True,
        usage="%(prog)s MODEL|RUN [--tasks A,B] [options] [--section.key=value ...]",
        description="Evaluates a run on held-out data, or a model on tasks of lm-evaluation-harness.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    model = "Hugging Face directory, GGUF file, checkpoint, output directory of a run, or adapter; or the YAML of a run"
    add("subject", nargs="?", type=Path, metavar="MODEL|RUN", help=model)
    add("--model", type=Path, metavar="PATH", help="same as MODEL")
    add("--base", type=Path, metavar="DIR", help="base weights of an adapter, if its own configuration is outdated")
    add("--tasks", type=_names, metavar="A,B", help="tasks or task groups, separated by commas")
    add("--data", metavar="DIR", help=f"directory of data sets (default: {DATA})")
    add("--limit", type=positive, metavar="N", help="questions per task (default: all)")
    add("--num-fewshot", type=int, metavar="K", help="solved examples before each question (default: set by the task)")
    add("--batch-size", type=positive, metavar="B", help=f"texts per batch (default: {BATCH_SIZE})")
    add("--max-length", type=positive, metavar="L", help="longest text in tokens (default: set by the model)")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer (default: that of the model)")
    chat = "pose questions as conversations, with examples as turns"
    add("--apply-chat-template", action="store_true", default=None, help=chat)
    add("--gen-kwargs", type=_pairs, metavar="K=V,…", help="options of generation")
    add("--include-path", metavar="DIR", help="directory of additional tasks (YAMLs of the harness)")
    unsafe = "execute code that the model writes (HumanEval), or that tasks of --include-path name"
    add("--confirm-run-unsafe-code", action="store_true", default=None, help=unsafe)
    add("--log-samples", action="store_true", default=None, help="write every question with its answer")
    directory = f"directory of results (default: {OUTPUT}; for a YAML its output_dir)"
    add("--output", type=output_directory, metavar="DIR", help=directory)
    add_print_config(parser)
    add("--json", action="store_true", help="print one JSON object (with tasks)")
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("the list of tasks is empty")
    return names


def _pairs(text: str) -> dict[str, Any]:
    """Return ``a=1,b=x`` as a mapping, with values read as YAML."""
    import yaml

    pairs = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise argparse.ArgumentTypeError(f"{part}: write name=value")
        pairs[name.strip()] = yaml.safe_load(value)
    return pairs


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, and print the results; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, overrides = make_parser().parse_known_args(words)
    subject = options.subject or options.model
    if subject is None or (options.subject and options.model):
        raise UserError("mindllm evaluate: name one model or run; example: mindllm evaluate DIR --tasks gsm8k")
    if subject.suffix in (".yaml", ".yml"):
        config = _load_run(subject, options, overrides)
        if options.print_config:
            return print_config(config)
        if options.json and not config.eval_tasks:
            raise UserError("--json requires tasks; pass --tasks arc_challenge,gsm8k")
        if not config.eval_tasks or config.parallel_config.device_num > 1:
            receive_interrupts()
            return run(config)
        return _evaluate_on_tasks(config, config.load_checkpoint, options.json)
    if not options.tasks:
        raise UserError("--tasks is missing; example: --tasks arc_challenge,gsm8k")
    import lm_eval  # noqa: F401  (report a missing library before any work)

    config = _configure_model(subject, options, overrides, words)
    return print_config(config) if options.print_config else _evaluate_on_tasks(config, str(subject), options.json)


def _evaluate_on_tasks(config: RunConfig, name: str, as_json: bool) -> int:
    import lm_eval  # noqa: F401  (report a missing library before any work)

    from mindllm.config import on_this_device
    from mindllm.evaluate.evaluation import evaluate_on_tasks, failure_of
    from mindllm.evaluate.outcome import Scores
    from mindllm.evaluate.report import PAGE, table
    from mindllm.evaluate.report import as_json as tree_of
    from mindllm.train.device import prepare_environment, set_up_device

    config, note = on_this_device(config)
    if note:
        error_console.print(note)
    directory = Path(config.output_dir)
    with drawn(*REMAINING) as progress:
        prepare_environment(config)
        set_up_device(config)
        with interruptible():
            outcome = evaluate_on_tasks(config, config.eval_tasks, directory, progress=progress)
    if as_json:
        print_json(Scores(tree_of(outcome, name)).to_dict())
    elif outcome.results["results"]:
        output.print(table(outcome))
    error_console.print(f"results, with wrong answers in {PAGE}: {directory}")
    if outcome.failures:
        raise failure_of(outcome.failures)
    return 0


def _load_run(path: Path, options: argparse.Namespace, overrides: list[str]) -> RunConfig:
    """Load the run of a YAML, with the options of the command line as its keys."""
    from mindllm.config import load_config, override_config

    keys: dict[str, Any] = {f"evaluation.{key}": value for key, value in _evaluation_keys(options).items()}
    keys |= {"eval_tasks": options.tasks} if options.tasks else {}
    keys |= {"output_dir": str(options.output)} if options.output else {}
    config = load_config(path, with_mode(overrides, "eval"))
    if options.batch_size and not options.tasks and not config.eval_tasks:  # the batch of the held-out loss
        keys = {"runner_config.batch_size": options.batch_size, **keys}
    return override_config(config, keys) if keys else config


def _configure_model(
    subject: Path, options: argparse.Namespace, overrides: list[str], words: Sequence[str]
) -> RunConfig:
    """Return the evaluation of a model, and write its YAML."""
    from mindllm.recipes.model_source import find_model
    from mindllm.recipes.using import evaluate_recipe

    model = find_model(subject, options.base)
    for note in model.notes():
        error_console.print(note)
    directory = options.output or Path(OUTPUT)
    command = shlex.join(["mindllm", "evaluate", *words])
    recipe = evaluate_recipe(model, command, directory, options.tasks, _evaluation_keys(options))
    keys = [f"--processor.tokenizer.vocab_file={options.tokenizer}"] if options.tokenizer else []
    keys += [f"--model.model_config.seq_length={options.max_length}"] if options.max_length else []
    made = recipe.made([*keys, *overrides])
    file = made.config.processor.tokenizer.vocab_file
    if not file or not Path(file).exists():
        reason = f"{file} does not exist" if file else "the model names none"
        raise UserError(f"{subject}: the tokenizer is missing ({reason}); pass --tokenizer FILE")
    if not options.print_config:
        made.write(path := directory / "evaluate.yaml")
        error_console.print(f"settings and reasons: {path} (repeat: mindllm evaluate {shlex.quote(str(path))})")
    return made.config


def _evaluation_keys(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are keys of the section ``evaluation``."""
    from mindllm.config.generation import EvaluationConfig

    values = {name: getattr(options, name) for name in EvaluationConfig.model_fields}
    return {name: value for name, value in values.items() if value is not None}


if __name__ == "__main__":
    run_command(main)
