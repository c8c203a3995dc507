"""Executes a run: parts shared by the verbs that train, evaluate and generate, and the command line of ``run_llm.py``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, run_command
from mindllm.errors import UserError
from mindllm.process.interrupts import INTERRUPTED, leave_on_interrupt, own_interrupts, receive_interrupts
from mindllm.shorthands import SHORTHANDS

if TYPE_CHECKING:  # the schema is too slow to import for --help
    from mindllm.config import RunConfig
    from mindllm.run.outcome import RunOutcome

TINY, LAST = "configs/llama2/pretrain_llama2_tiny.yaml", "output/llama2_tiny/checkpoint/llm-400"
EXAMPLES = f"""
  python %(prog)s --config {TINY}
  python %(prog)s --config {TINY} --resume_training auto
  python %(prog)s --config {TINY} --batch_size 4 --print_config
  python %(prog)s --config configs/llama2/finetune_llama2_tiny.yaml \\
      --run_mode finetune --load_checkpoint {LAST}
  python %(prog)s --config {TINY} --run_mode eval --load_checkpoint {LAST}
  python %(prog)s --config {TINY} --run_mode predict --load_checkpoint {LAST} \\
      --input_data "def main():"
  python %(prog)s --config {TINY} --run_mode chat --load_checkpoint {LAST}
"""
KEYS = """
Any key of the configuration is an option: --section.key=value, or --key value at the top level;
docs/config_reference.md lists all keys.
Exit codes: 0 success, 1 failure, 2 invalid input, 130 interrupted (Ctrl-C).
"""
SCRIPT = "run_llm.py"
VERBS = {"train": "train", "finetune": "finetune", "eval": "evaluate", "predict": "generate", "chat": "chat"}
"""The verb of each run mode."""


def run_epilog(examples: str) -> str:
    """Return the end of ``--help`` of a verb that executes runs: short options of keys, and examples."""
    width = max(map(len, SHORTHANDS))
    lines = (f"  --{short.replace('_', '-'):<{width}}  {key}" for short, key in SHORTHANDS.items())
    return "\n".join(["short options of keys:", *lines, "", f"examples:{examples}{KEYS}"])


def add_print_config(parser: CommandParser) -> None:
    """Add the option that prints the resolved configuration."""
    parser.add_argument("--print-config", action="store_true", help="print the resolved YAML and exit")


def print_config(config: RunConfig) -> int:
    """Print the resolved YAML; return the exit code."""
    from mindllm.config import render_config

    sys.stdout.write(render_config(config, commented=True))
    return 0


def make_parser() -> CommandParser:
    """Return the parser of ``run_llm.py``."""
    parser = CommandParser(
        prog=SCRIPT,
        takes_keys=True,
        usage=f"{SCRIPT} --config RUN [--print-config] [--section.key=value ...]",
        description="Trains, fine-tunes, evaluates, generates or chats, as run_mode of the YAML says.",
        epilog=run_epilog(EXAMPLES),
    )
    parser.add_run()
    add_print_config(parser)
    return parser


def read_config(arguments: Sequence[str] | None = None) -> tuple[Namespace, RunConfig]:
    """Return the options of the command line of ``run_llm.py``, and its configuration with overrides."""
    options, overrides = make_parser().parse_known_args(arguments)
    from mindllm.config import load_config

    return options, load_config(options.run, overrides)


def with_mode(overrides: Sequence[str], run_mode: str) -> list[str]:
    """Return the overrides with the run mode of the verb.

    Raises:
        UserError: they set another mode.
    """
    for option, following in pairwise([*overrides, ""]):
        name, equals, value = option.partition("=")
        mode = value if equals else following
        if name == "--run_mode" and mode != run_mode:
            other = f", or use mindllm {VERBS[mode]}" if mode in VERBS else ""
            raise UserError(f"--run_mode {mode}: contradicts mindllm {VERBS[run_mode]}; remove it{other}")
    return [*overrides, f"--run_mode={run_mode}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``run_llm.py``; return the exit code."""
    receive_interrupts()
    options, config = read_config(arguments)
    return print_config(config) if options.print_config else run(config)


def run(config: RunConfig) -> int:
    """Execute a run in its mode; return the exit code. MindSpore is imported only after all checks."""
    from mindllm.cli.nodes import rank_task, start_ranks
    from mindllm.config import on_this_device
    from mindllm.terminal.console import error_console
    from mindllm.train.job.preflight import check_preconditions

    if task := rank_task(config):
        return start_ranks(config, task)
    check_preconditions(config)
    config, note = on_this_device(config)
    if note:
        error_console.print(note)
    leave_on_interrupt()
    if config.run_mode in ("train", "finetune", "eval"):
        receive_interrupts()
        return _start(config)
    from mindllm.cli.generation import chat, predict
    from mindllm.train.device import prepare_environment

    prepare_environment(config)
    (predict if config.run_mode == "predict" else chat)(config)
    return 0


def _start(config: RunConfig) -> int:
    from mindllm.run.start import start
    from mindllm.terminal.render import passing

    with passing() as progress:
        return INTERRUPTED if start(config, progress, _show).interrupted else 0


def _show(outcome: RunOutcome) -> None:
    from mindllm.terminal.console import output
    from mindllm.terminal.tables import pairs

    if outcome.results:
        directory = f"{Path.cwd()}/"  # paths below it are shown as they are typed
        output.print(pairs((name, value.removeprefix(directory)) for name, value in outcome.results.items()))
    if outcome.scores:
        output.print(outcome.scores)


def command() -> None:
    """Run ``run_llm.py`` as the command of this process."""
    own_interrupts()
    run_command(main)
