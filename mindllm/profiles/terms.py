"""One cause on one rank, and its seconds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Cause = Literal[
    "kernel", "work", "unknown", "not in kernels", "exchange", "exposed", "waits for ranks", "bubble", "data", "begin", "host",
    "imbalance",
]  # fmt: skip
Key = tuple[Cause, Hashable]


@dataclass
class Term:
    """Seconds of one cause on one rank.

    Attributes:
        group: of operators or exchanges that it is about.
        detail: what JSON says of it besides.
        runs: how often it ran in a step, where that is known.
        about: what tells it from other terms of its cause.
    """

    cause: Cause
    what: str
    seconds: float = 0.0
    group: Hashable = None
    detail: Mapping[str, object] = field(default_factory=dict)
    runs: float = math.inf
    about: Hashable = ""
