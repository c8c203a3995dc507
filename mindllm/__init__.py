"""mindllm: static-parallel training of large language models with MindSpore, proved before it is launched.

The public functions are those of :mod:`mindllm.api` (docs/python.md); each imports what it needs when it is called. Six of them
share their name with a package, such as ``mindllm.train``: those packages are callable, so that the name means both.
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
        evaluate,
        generate,
        inspect,
        load_config,
        plan,
        plan_problem,
        prove,
        search,
        step_time,
        time_program,
        train,
        verify,
        verify_program,
    )
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
CALLABLE_PACKAGES = ("dry_run", "evaluate", "generate", "prove", "train", "verify")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name[:LONGEST_NAME]!r}")
    if name in CALLABLE_PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    module = "api" if name.islower() else "config" if name == "RunConfig" else "errors"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package; makes the packages of :data:`CALLABLE_PACKAGES` callable when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in CALLABLE_PACKAGES and isinstance(value, ModuleType):
            function = staticmethod(getattr(importlib.import_module(f"{__name__}.api"), name))
            # __wrapped__ is what inspect.signature reads
            value.__class__ = type("CallablePackage", (ModuleType,), {"__call__": function, "__wrapped__": function})
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
