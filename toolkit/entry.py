"""The tools as installed commands: ``mindllm-plan`` is ``python -m toolkit.pipeline_balance``, and so on."""

from __future__ import annotations

from importlib import import_module

from mindllm.interrupts import own_interrupts


def plan() -> None:
    """``mindllm-plan``."""
    _run("toolkit.pipeline_balance")


def dry_run() -> None:
    """``mindllm-dry-run``."""
    _run("toolkit.dry_run")


def check() -> None:
    """``mindllm-check``."""
    _run("toolkit.cluster_check")


def inspect() -> None:
    """``mindllm-inspect``."""
    _run("toolkit.ir_inspect")


def offline() -> None:
    """``mindllm-offline``."""
    _run("toolkit.offline")


def _run(tool: str) -> None:
    own_interrupts()
    from mindllm.command import run_command

    run_command(import_module(f"{tool}.__main__").main)
