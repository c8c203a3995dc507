"""The pieces of work of a proof: which questions each answers, and what its answers depend on."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindllm.config import RunConfig
from mindllm.prove.answers import Answer
from mindllm.prove.questions import (
    CHECKPOINTS,
    COMMUNICATION,
    CONFORMANCE,
    DATA,
    MEMORY,
    PARITY,
    RECOMPUTATION,
    START,
    STEP_TIME,
)
from mindllm.sources import software_key
from mindllm.terminal.progress import Progress
from mindllm.timing.device import DEFAULT, read_device

OF_NO_GRAPH = (
    "output_dir",
    "overwrite",
    "resume_training",
    "require_proof",
    "trainer.model_name",
    "train_dataset.data_loader.config.data_path",
    "processor.tokenizer.vocab_file",
    "input_data",
    "save_file",
    "generation",
    "evaluation",
    "eval_tasks",
    "export_hf",
)
"""Keys that neither memory, nor graphs, nor time of a step depend on. All others are taken to matter."""


@dataclass(frozen=True)
class Options:
    """How to prove.

    Attributes:
        device: the described device that steps are timed on; empty: the default.
        search: whether all strategies of as many devices are searched for a faster one.
        advice: seconds for changes that would close a shortage of memory.
        workers: processes at once in a piece; None: by cores and memory.
        every_rank: whether all ranks are compiled; otherwise some are derived from others where that is shown to be right.
    """

    device: str = ""
    search: bool = False
    advice: float = 20.0
    workers: int | None = None
    every_rank: bool = False


Work = Callable[[RunConfig, Options, Progress], Iterable[Answer]]


@dataclass(frozen=True)
class Piece:
    """A piece of work.

    Attributes:
        name: what progress calls it.
        questions: which it answers, in this order; of one that several pieces have, each answers a part.
        module: where its ``answers(config, options, progress)`` is; imported in the process that does the work alone.
        neutral: dotted keys that its answers do not depend on; None: they depend on files, too, and are never kept.
        options: names of the options that they depend on.
    """

    name: str
    questions: tuple[str, ...]
    module: str
    neutral: tuple[str, ...] | None = None
    options: tuple[str, ...] = ()

    def work(self) -> Work:
        """Return what answers the questions."""
        return importlib.import_module(self.module).answers

    def key(self, config: RunConfig, options: Options) -> str | None:
        """Return the name under which its answers are kept; None where they are not."""
        if self.neutral is None:
            return None
        chosen = {name: getattr(options, name) for name in self.options}
        if "device" in chosen:  # a file of the user may say something else the next time
            chosen["device"] = read_device(options.device or DEFAULT).model_dump(mode="json")
        text = json.dumps([self.name, without(config, self.neutral), chosen, software_key()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


ROOM = "mindllm.prove.checks"
PIECES = (
    Piece("data", (DATA,), f"{ROOM}.data"),
    Piece("start", (START,), f"{ROOM}.start"),
    Piece("step time", (STEP_TIME,), f"{ROOM}.step_time", OF_NO_GRAPH, ("device", "search")),
    Piece("stages", (MEMORY,), f"{ROOM}.stages", OF_NO_GRAPH, ("advice",)),
    Piece("ranks", (PARITY, CONFORMANCE, CHECKPOINTS), f"{ROOM}.ranks", OF_NO_GRAPH, ("every_rank",)),
    Piece("graphs", (RECOMPUTATION, COMMUNICATION, CONFORMANCE), f"{ROOM}.graphs", OF_NO_GRAPH, ("device",)),
)
"""In the order in which they are begun: what is known soonest and fails most often comes first."""


def without(config: RunConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Return a resolved configuration as a tree, without some dotted keys."""
    tree = config.model_dump(by_alias=True, mode="json", warnings=False)
    for key in keys:
        *parents, last = key.split(".")
        node: Any = tree
        for name in parents:
            node = node.get(name) if isinstance(node, Mapping) else None
        if isinstance(node, dict):
            node.pop(last, None)
    return tree
