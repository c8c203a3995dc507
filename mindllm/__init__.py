"""mindllm: static-parallel training of large language models with MindSpore, proved before it is launched.

The public functions are those of :mod:`mindllm.api`, :mod:`mindllm.api_programs` and :mod:`mindllm.api_execution`
(docs/python.md); each imports what it needs when it is called. Six of them have the name of a room, ``mindllm.train`` for one:
that package is callable, so that the name means both.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mindllm.config.reading.foreign import READERS
from mindllm.versions import __version__ as __version__

if TYPE_CHECKING:
    from mindllm.api import (
        configure,
        dry_run,
        inspect,
        load_config,
        plan,
        plan_problem,
        prove,
        search,
        step_time,
        verify,
    )
    from mindllm.api_execution import evaluate, generate, train
    from mindllm.api_programs import time_program, verify_program
    from mindllm.config import RunConfig
    from mindllm.errors import CheckFailed, RunFailed, UserError

__all__ = [
    "CheckFailed",
    "RunConfig",
    "RunFailed",
    "UserError",
    "configure",
    "dry_run",
    "evaluate",
    "generate",
    "inspect",
    "load_config",
    "plan",
    "plan_problem",
    "prove",
    "search",
    "step_time",
    "time_program",
    "train",
    "verify",
    "verify_program",
]
READERS.append("mindllm.mindformers.reader")  # imported when a YAML has keys that only MindFormers has
LONGEST_NAME = 80  # that an error quotes
ROOMS = ("dry_run", "evaluate", "generate", "prove", "train", "verify")
HOMES = {"RunConfig": "config", "CheckFailed": "errors", "RunFailed": "errors", "UserError": "errors"}
HOMES |= dict.fromkeys(("evaluate", "generate", "train"), "api_execution")
HOMES |= dict.fromkeys(("time_program", "verify_program"), "api_programs")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name[:LONGEST_NAME]!r}")
    if name in ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package, which makes those of its rooms callable that have the name of a function as soon as they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ROOMS and isinstance(value, ModuleType):
            value.__class__ = _callable_room(name)
        super().__setattr__(name, value)


def _callable_room(name: str) -> type[ModuleType]:
    function = getattr(importlib.import_module(f"{__name__}.{HOMES.get(name, 'api')}"), name)
    called = staticmethod(function)
    return type("Room", (ModuleType,), {"__call__": called, "__wrapped__": called})  # the latter for inspect.signature


sys.modules[__name__].__class__ = _Package
