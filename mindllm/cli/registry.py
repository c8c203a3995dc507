"""The verbs of ``mindllm``: one table for help, dispatch, completion, documentation and tests.

A new verb is ``<verb>.py`` with ``make_parser()`` and ``main(arguments)``, and a row here. This module and the top of each
verb's file import nothing heavy: every ``--help`` pays for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindllm.command import CommandParser


@dataclass(frozen=True)
class Verb:
    """A verb: its line in ``--help`` and the module of its parser and entry point.

    Attributes:
        name: the word on the command line.
        group: the group of ``--help``.
        help: one line.
        file: name of the module in ``mindllm/cli`` if it is not that of the verb; it serves several verbs, and its
            ``make_parser`` and ``main`` take the name of the verb.
        takes_keys: whether unknown options are keys of a run's YAML.
        with_next: the line of ``--help`` that it shares with the next verb.
    """

    name: str
    group: str
    help: str
    file: str = ""
    takes_keys: bool = True
    with_next: str = ""

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        return f"mindllm.cli.{self.file or self.name.replace('-', '_')}"

    def function(self, name: str, *arguments: Any) -> Any:
        """Import the module and call a function of it, with the name of the verb if it serves several."""
        shared = (self.name,) if self.file else ()
        return getattr(importlib.import_module(self.module), name)(*arguments, *shared)

    def parser(self) -> CommandParser:
        """Return the parser of the command line."""
        return self.function("make_parser")

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Run the verb with ``arguments`` (None: those of the process) and return its exit code.

        The parser answers ``--help`` and misspelt options before anything heavy is imported.
        """
        self.parser().parse_known_args(arguments)
        return self.function("main", arguments)


TABLE = (
    Verb("train", "train", "train a model, from scratch or from a checkpoint", "train"),
    Verb("finetune", "train", "fine-tune a model on conversations", "train"),
    Verb("pretrain", "train", "train a known network on text, from scratch", "train"),
    Verb("loss-curve", "train", "plot the losses of runs", takes_keys=False),
    Verb("prove", "prove", "check that a run is ready to launch"),
    Verb("check", "prove", "check that all ranks match a single device"),
    Verb("dry-run", "prove", "memory of each stage by MindSpore's dry run"),
    Verb("inspect", "prove", "operators and communication of a rank's graph"),
    Verb("offline", "prove", "dry run of any MindSpore program", takes_keys=False),
    Verb("configure", "plan", "find and prove a run for a network and devices"),
    Verb("search", "plan", "find the fastest parallel strategy that fits"),
    Verb("plan", "plan", "optimal pipeline stages, chunks and recomputation"),
    Verb("time", "plan", "predict the time of a step", with_next="predict step time; explain a recorded step"),
    Verb("profile", "plan", "compare a recorded step with the prediction"),
    Verb("models", "prepare", "list shipped and local models", "", False, "list models; download a model from a hub"),
    Verb("fetch", "prepare", "download a model from a hub", takes_keys=False),
    Verb("convert", "prepare", "convert a YAML of MindFormers", with_next="convert MindFormers YAMLs; schema for editors"),
    Verb("schema", "prepare", "print the JSON Schema of a YAML", takes_keys=False),
    Verb("weights", "prepare", "import, export, merge or quantize weights", "weights", False,
         "convert weights; quantize to 4 or 8 bits"),
    Verb("quantize", "prepare", "quantize a model to 4 or 8 bits", "weights", False),
    Verb("data", "prepare", "tokenize text into a corpus", "", False, "tokenize text; show the samples of a run"),
    Verb("view", "prepare", "show the samples of a run"),
    Verb("preflight", "launch", "check this node before a run", with_next="check a node; start a run as several processes"),
    Verb("launch", "launch", "start a run as several processes", takes_keys=False),
    Verb("accept", "launch", "test mindllm on this cluster with small runs", takes_keys=False),
    Verb("evaluate", "use", "held-out loss, or scores on tasks such as mmlu"),
    Verb("generate", "use", "answer or continue prompts", "generate"),
    Verb("chat", "use", "chat with a model", "generate"),
)  # fmt: skip
VERBS = {verb.name: verb for verb in TABLE}
ALIASES = {"eval": "evaluate", "predict": "generate"}  # run modes of MindFormers

USAGE = "usage: mindllm VERB [options]   (mindllm VERB --help lists the options)\n"
LAST = "also      --version; completion bash|zsh|fish prints a script for that shell\n"


def overview() -> str:
    """Return the text of ``mindllm --help``: every verb on one screen of 80 columns and 24 lines, in groups."""
    lines, previous, verbs = [USAGE], "", iter(TABLE)
    for verb in verbs:
        names, text = verb.name, verb.help
        if verb.with_next:
            names, text = f"{verb.name}, {next(verbs).name}", verb.with_next
        group = "" if verb.group == previous else verb.group
        lines.append(f"{group:<10}{names:<18}{text}\n")
        previous = verb.group
    return "".join([*lines, LAST])
