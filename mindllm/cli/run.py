"""Trains, fine-tunes, evaluates, predicts and chats: one YAML says everything, ``--a.b.c=value`` overrides any key of it."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from mindllm.command import CommandParser, run_command
from mindllm.config import RunConfig, load_config, on_this_device, render_config
from mindllm.config.overrides import SHORTHANDS
from mindllm.console import error_console
from mindllm.interrupts import leave_on_interrupt, own_interrupts, receive_interrupts

EXAMPLES = """examples:
  python run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml
  python run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml --resume_training auto
  python run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml --run_mode eval \\
      --load_checkpoint output/llama2_tiny/checkpoint/llm-400
  python run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml --run_mode predict \\
      --load_checkpoint output/llama2_tiny/checkpoint/llm-400 --input_data "def main():"
  python run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml --run_mode predict \\
      --load_checkpoint output/llama2_tiny/checkpoint/llm-400 --input_data prompts.jsonl --save_file results.jsonl
  python run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml --run_mode chat \\
      --load_checkpoint output/llama2_tiny/checkpoint/llm-400
  python run_llm.py --config configs/llama2/pretrain_llama2_tiny.yaml --batch_size 4 --print_config

Any key of the configuration can be given as --section.key=value, a key of the top level as --key value;
docs/config_reference.md lists them all. Exit codes: 0 good, 1 failure, 2 wrong input, 130 interrupted (Ctrl-C).
"""


def parser() -> CommandParser:
    """Returns the parser of what is not an override."""
    shorthands = "\n".join(f"  --{short} = --{full}" for short, full in SHORTHANDS.items())
    command = CommandParser(
        prog="run_llm.py",
        usage="run_llm.py --config FILE [--print_config] [--section.key=value ...]",
        description=__doc__,
        epilog=f"shorthands:\n{shorthands}\n\n{EXAMPLES}",
    )
    command.add_argument("--config", required=True, metavar="FILE", help="YAML of the run")
    command.add_argument("--print_config", action="store_true", help="print the resolved YAML and exit")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what ``run_mode`` says; returns the exit code."""
    options, config = read_config(arguments)
    if options.print_config:
        sys.stdout.write(render_config(config))
        return 0
    return run(config)


def read_config(arguments: Sequence[str] | None = None) -> tuple[Namespace, RunConfig]:
    """The options of the command line, and the configuration that it names with its overrides."""
    options, overrides = parser().parse_known_args(arguments)
    return options, load_config(options.config, overrides)


def run(config: RunConfig) -> int:
    """Imports what the mode needs, and MindSpore, only now: an error in the YAML is told within a second."""
    from mindllm.train.job.preflight import refuse_what_must_fail

    refuse_what_must_fail(config)
    config, said = on_this_device(config)
    if said:
        error_console.print(said)
    leave_on_interrupt()
    if config.run_mode in ("train", "finetune", "eval"):
        receive_interrupts()
        from mindllm.run.start import start

        return start(config)
    from mindllm.train.device import prepare_environment

    prepare_environment(config)
    if config.run_mode == "predict":
        from mindllm.generate.predict import predict

        return predict(config)
    from mindllm.generate.chat import chat

    return chat(config)


def command() -> None:
    """The installed command ``mindllm``."""
    own_interrupts()
    run_command(main)
