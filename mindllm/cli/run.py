"""Trains, fine-tunes, evaluates, predicts and chats: one YAML says everything, ``--a.b.c=value`` overrides any key of it."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.finetune import FINETUNE, PRETRAIN, afterwards, launch_line, read_learning
from mindllm.cli.generate import CHAT, GENERATE, read_use
from mindllm.cli.run_options import read_config
from mindllm.command import run_command
from mindllm.process.interrupts import INTERRUPTED, leave_on_interrupt, own_interrupts, receive_interrupts

if TYPE_CHECKING:  # the schema takes longer to import than --help may
    from mindllm.config import RunConfig
    from mindllm.run.outcome import RunOutcome


def main(arguments: Sequence[str] | None = None, run_mode: str = "") -> int:
    """Run what ``run_mode``, or the YAML, says; return the exit code."""
    receive_interrupts()
    options, config = _read(arguments, run_mode)
    if options.print_config:
        from mindllm.config import render_config

        sys.stdout.write(render_config(config, commented=True))
        return 0
    if run_mode in (FINETUNE, PRETRAIN):
        return _learn(config, run_mode)
    return run(config)


def _read(arguments: Sequence[str] | None, run_mode: str) -> tuple[Namespace, RunConfig]:
    if run_mode in (CHAT, GENERATE):
        return read_use(arguments, run_mode)
    if run_mode in (FINETUNE, PRETRAIN):
        return read_learning(arguments, run_mode)
    return read_config(arguments, run_mode)


def _learn(config: RunConfig, verb: str) -> int:
    """Train, and say what can be done with the result; several devices are started by the launcher."""
    from mindllm.terminal.console import error_console

    if line := launch_line(config, verb):
        error_console.print(line)
        return 0
    code = run(config)
    for line in afterwards(config, verb, code):
        error_console.print(line)
    return code


def run(config: RunConfig) -> int:
    """Import what the mode needs, and MindSpore, only now: an error in the YAML is told within a second."""
    from mindllm.cli.ranks import start_ranks, task_of_several
    from mindllm.config import on_this_device
    from mindllm.terminal.console import error_console
    from mindllm.train.job.preflight import check_preconditions

    if place := task_of_several(config):
        return start_ranks(config, place)
    check_preconditions(config)
    config, said = on_this_device(config)
    if said:
        error_console.print(said)
    leave_on_interrupt()
    if config.run_mode in ("train", "finetune", "eval"):
        receive_interrupts()
        return _start(config)
    from mindllm.train.device import prepare_environment

    prepare_environment(config)
    if config.run_mode == "predict":
        from mindllm.cli.predict import predict

        predict(config)
    else:
        from mindllm.cli.chat import chat

        chat(config)
    return 0


def _start(config: RunConfig) -> int:
    from mindllm.run.start import start
    from mindllm.terminal.render import passing

    with passing() as progress:
        return INTERRUPTED if start(config, progress, _show).interrupted else 0


def _show(ended: RunOutcome) -> None:
    from mindllm.terminal.console import output
    from mindllm.terminal.tables import pairs

    if ended.results:
        output.print(pairs((name, _near(value)) for name, value in ended.results.items()))
    if ended.scores:
        output.print(ended.scores)


def _near(value: str) -> str:
    """A path below the working directory as one types it; other values as they are."""
    here = f"{Path.cwd()}/"
    return value.removeprefix(here)


def command() -> None:
    """Run ``run_llm.py``."""
    own_interrupts()
    run_command(main)
