"""The option ``--executor``, which processes that a command starts inherit."""

from __future__ import annotations

import argparse
import os
from typing import Any

from mindllm.errors import UserError, nearest

LOCAL, RAY = "local", "ray"
EXECUTORS = (LOCAL, RAY)
VARIABLE = "MINDLLM_EXECUTOR"


def add_executor_option(parser: argparse.ArgumentParser) -> None:
    """The option of every tool whose work can be spread."""
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        action=_UseExecutor,
        help=f"where simulations, ranks and strategies are worked on: {LOCAL} processes, or the {RAY} cluster of $RAY_ADDRESS "
        f"(default: {LOCAL}, or ${VARIABLE}; pip install 'mindllm[ray]')",
    )


def is_spread() -> bool:
    """Return whether work goes to a Ray cluster; raise UserError for a variable that names no executor."""
    chosen = os.environ.get(VARIABLE, LOCAL)
    if chosen not in EXECUTORS:
        raise UserError(f"{VARIABLE}: {chosen} is no executor{nearest(chosen, EXECUTORS)}")
    return chosen == RAY


class _UseExecutor(argparse.Action):
    """Sets the executor of this process and of those it starts."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        os.environ[VARIABLE] = str(values)
        setattr(namespace, self.dest, values)
