"""The verbs of ``mindllm``: one table for help, dispatch, completion, documentation and tests.

A new verb is ``<verb>.py`` with ``make_parser()`` and ``main(arguments)``, and a row here. Nothing heavy is
imported here, which every command pays for, nor at the top of a verb's file, which its ``--help`` pays for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindllm.command import CommandParser


@dataclass(frozen=True)
class Verb:
    """One verb: where ``--help`` lists it, and the modules of its parser and its entry point."""

    name: str
    group: str  # what people want when they look for it
    help: str  # one line
    parsers: str  # the module of make_parser()
    module: str  # the module of main(arguments), for most verbs the same
    run_mode: str = ""  # what train, finetune, eval, predict and chat set; make_parser and main take it, too
    takes_keys: bool = True  # whether options it does not know are keys of a run's YAML
    with_next: str = ""  # what --help says of it and the next one, which then share a line

    def parser(self) -> CommandParser:
        """Return the parser of its command line."""
        make = importlib.import_module(self.parsers).make_parser
        return make(self.run_mode) if self.run_mode else make()

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Run the verb and return its exit code.

        ``--help`` and misspelt options are answered before anything heavy is imported. Without ``arguments`` those of the
        process are taken.
        """
        self.parser().parse_known_args(arguments)
        main = importlib.import_module(self.module).main
        return main(arguments, self.run_mode) if self.run_mode else main(arguments)


RUN = "mindllm.cli.run"
RUN_PARSERS = "mindllm.cli.run_options"


def _tool(name: str, group: str, text: str, takes_keys: bool = True, with_next: str = "") -> Verb:
    module = f"mindllm.cli.{name.replace('-', '_')}"
    return Verb(name, group, text, module, module, takes_keys=takes_keys, with_next=with_next)


def _run(name: str, group: str, text: str, with_next: str = "") -> Verb:
    return Verb(name, group, text, RUN_PARSERS, RUN, run_mode=name, with_next=with_next)


def _learn(name: str, text: str) -> Verb:
    return Verb(name, "train", text, "mindllm.cli.finetune", RUN, run_mode=name)


def _use(name: str, text: str) -> Verb:
    return Verb(name, "use", text, "mindllm.cli.generate", RUN, run_mode=name)


FETCHED = "what there is here; a model directory from a hub"
TIMED = "how long a step takes; where a recorded one differs"
YAMLS = "YAML of MindFormers into ours; a schema for editors"
ROUNDED = "import, export, merge weights; round to 4 or 8 bits"
SEEN = "text into an indexed corpus; the samples of a run"
JUDGED = "loss on held-out data; scores on tasks such as mmlu"
ANSWERED = "continue prompts; answer them with a model"
LAUNCHED = "check a node; start a run as several processes"
TABLE = (
    _run("train", "train", "train a model, from scratch or from a checkpoint"),
    _learn("finetune", "train a model directory further on conversations"),
    _learn("pretrain", "train a known network from new weights on text"),
    _tool("loss-curve", "train", "draw the losses of runs", takes_keys=False),
    _tool("prove", "prove", "one verdict: is this run ready to be launched?"),
    _tool("check", "prove", "all ranks compute what one device does"),
    _tool("dry-run", "prove", "memory of every stage, by MindSpore's dry run"),
    _tool("inspect", "prove", "what is in the compiled graph of a rank"),
    _tool("offline", "prove", "dry run of any MindSpore program", takes_keys=False),
    _tool("configure", "plan", "from a network and devices to a proved run"),
    _tool("search", "plan", "find the fastest strategy that fits the devices"),
    _tool("plan", "plan", "stages, chunks and recomputation to a proven bound"),
    _tool(
        "time",
        "plan",
        "how long a step takes, and where the time goes",
        with_next=TIMED,
    ),
    _tool("profile", "plan", "where a recorded step differs from the predicted"),
    _tool("models", "prepare", "models with YAMLs here, and what directories hold", False, FETCHED),
    _tool("fetch", "prepare", "download a model directory from a hub", takes_keys=False),
    _tool(
        "convert",
        "prepare",
        "turn a YAML of MindFormers into ours",
        with_next=YAMLS,
    ),
    _tool("schema", "prepare", "what an editor checks a run's YAML by", takes_keys=False),
    _tool(
        "weights",
        "prepare",
        "import, export, merge or quantize weights",
        takes_keys=False,
        with_next=ROUNDED,
    ),
    _tool("quantize", "prepare", "round a model to 4 or 8 bits", takes_keys=False),
    _tool("data", "prepare", "turn text into an indexed corpus", False, SEEN),
    _tool("view", "prepare", "show the samples that a model gets"),
    _tool("preflight", "launch", "check this node before a run", with_next=LAUNCHED),
    _tool("launch", "launch", "start a run as several processes", takes_keys=False),
    _tool("accept", "launch", "what mindllm claims, beside a few small runs", takes_keys=False),
    _run("eval", "use", "loss and perplexity on held-out data", with_next=JUDGED),
    _tool("evaluate", "use", "score a model on tasks such as mmlu", takes_keys=False),
    _run("predict", "use", "continue prompts", with_next=ANSWERED),
    _use("generate", "answer prompts with a model directory"),
    _use("chat", "talk to a model directory"),
)
VERBS = {verb.name: verb for verb in TABLE}

USAGE = "usage: mindllm VERB [options]   (mindllm VERB --help lists the options of one)\n"
LAST = "also      --version; completion bash|zsh|fish prints a script for that shell\n"


def overview() -> str:
    """Return what ``mindllm --help`` prints: every verb on one screen of 80 columns and 24 lines, by what people want.

    A line for each verb, or for two that share one; the name of their group before the first of it.
    """
    lines, before, verbs = [USAGE], "", iter(TABLE)
    for verb in verbs:
        names, text = verb.name, verb.help
        if verb.with_next:
            names, text = f"{verb.name}, {next(verbs).name}", verb.with_next
        group = "" if verb.group == before else verb.group
        lines.append(f"{group:<10}{names:<18}{text}\n")
        before = verb.group
    return "".join([*lines, LAST])
