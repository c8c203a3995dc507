"""The verbs of ``mindllm``: one table that help, dispatch, completion, the old names in ``toolkit/``, the docs and tests walk.

A new verb is ``<group>/<verb>.py`` with ``make_parser()`` and ``main(arguments)``, and a row here. Nothing heavy is
imported here, which every command pays for, nor at the top of a verb's file, which its ``--help`` pays for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindllm.command import CommandParser


@dataclass(frozen=True)
class Verb:
    """One verb: where ``--help`` lists it, what runs it, and the name it had before."""

    name: str
    group: str  # what people want when they look for it
    help: str  # one line
    parsers: str  # the module of make_parser()
    module: str  # the module of main(arguments), for most verbs the same
    old: str  # how it was, and still is, called besides
    run_mode: str = ""  # what train, finetune, eval, predict and chat set; make_parser and main take it, too
    takes_keys: bool = True  # whether options it does not know are keys of a run's YAML
    with_next: str = ""  # what --help says of it and the next one, which then share a line

    def parser(self) -> CommandParser:
        """Return the parser of its command line."""
        make = importlib.import_module(self.parsers).make_parser
        return make(self.run_mode) if self.run_mode else make()

    def run(self, arguments: Sequence[str]) -> int:
        """Run it and return the exit code; ``--help`` and misspelt options are answered before anything heavy is imported."""
        self.parser().parse_known_args(arguments)
        main = importlib.import_module(self.module).main
        return main(arguments, self.run_mode) if self.run_mode else main(arguments)


RUN, RUN_SCRIPT = "mindllm.cli.run", "run_llm.py"
RUN_PARSERS = "mindllm.cli.run_options"


def _tool(name: str, group: str, text: str, old: str, takes_keys: bool = True, with_next: str = "") -> Verb:
    module = f"mindllm.cli.{group}.{name.replace('-', '_')}"
    return Verb(name, group, text, module, module, old, takes_keys=takes_keys, with_next=with_next)


def _run(name: str, group: str, text: str, with_next: str = "") -> Verb:
    old = f"{RUN_SCRIPT} --run_mode {name}"
    return Verb(name, group, text, RUN_PARSERS, RUN, old, run_mode=name, with_next=with_next)


def _learn(name: str, text: str, old: str) -> Verb:
    return Verb(name, "train", text, "mindllm.cli.train.from_data", RUN, old, run_mode=name)


def _use(name: str, text: str, old: str) -> Verb:
    return Verb(name, "use", text, "mindllm.cli.use.from_model", RUN, old, run_mode=name)


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
    _learn("finetune", "train a model directory further on conversations", f"{RUN_SCRIPT} --run_mode finetune"),
    _learn("pretrain", "train a known network from new weights on text", "mindllm pretrain"),
    _tool("loss-curve", "train", "draw the losses of runs", "python -m toolkit.loss_curve", takes_keys=False),
    _tool("prove", "prove", "one verdict: is this run ready to be launched?", "mindllm prove"),
    _tool("check", "prove", "all ranks compute what one device does", "python -m toolkit.cluster_check"),
    _tool("dry-run", "prove", "memory of every stage, by MindSpore's dry run", "python -m toolkit.dry_run"),
    _tool("inspect", "prove", "what is in the compiled graph of a rank", "python -m toolkit.ir_inspect"),
    _tool("offline", "prove", "dry run of any MindSpore program", "python -m toolkit.offline", takes_keys=False),
    _tool("configure", "plan", "from a network and devices to a proved run", "mindllm configure"),
    _tool("search", "plan", "find the fastest strategy that fits the devices", "python -m toolkit.tune"),
    _tool("plan", "plan", "stages, chunks and recomputation to a proven bound", "python -m toolkit.pipeline_balance"),
    _tool(
        "time",
        "plan",
        "how long a step takes, and where the time goes",
        "python -m toolkit.step_time",
        with_next=TIMED,
    ),
    _tool("profile", "plan", "where a recorded step differs from the predicted", "mindllm profile"),
    _tool("models", "prepare", "models with YAMLs here, and what directories hold", "mindllm models", False, FETCHED),
    _tool("fetch", "prepare", "download a model directory from a hub", "mindllm fetch", takes_keys=False),
    _tool(
        "convert",
        "prepare",
        "turn a YAML of MindFormers into ours",
        "python -m toolkit.convert_config",
        with_next=YAMLS,
    ),
    _tool("schema", "prepare", "what an editor checks a run's YAML by", "mindllm schema", takes_keys=False),
    _tool(
        "weights",
        "prepare",
        "import, export, merge or quantize weights",
        "python -m toolkit.weights",
        takes_keys=False,
        with_next=ROUNDED,
    ),
    _tool("quantize", "prepare", "round a model to 4 or 8 bits", "mindllm quantize", takes_keys=False),
    _tool("data", "prepare", "turn text into an indexed corpus", "python -m toolkit.data_preprocess", False, SEEN),
    _tool("view", "prepare", "show the samples that a model gets", "python -m toolkit.data_viewer"),
    _tool("preflight", "launch", "check this node before a run", "python -m toolkit.preflight", with_next=LAUNCHED),
    _tool("launch", "launch", "start a run as several processes", "python -m mindllm.launch", takes_keys=False),
    _tool("accept", "launch", "what mindllm claims, beside a few small runs", "mindllm accept", takes_keys=False),
    _run("eval", "use", "loss and perplexity on held-out data", with_next=JUDGED),
    _tool("evaluate", "use", "score a model on tasks such as mmlu", "python -m toolkit.evaluate", takes_keys=False),
    _run("predict", "use", "continue prompts", with_next=ANSWERED),
    _use("generate", "answer prompts with a model directory", "mindllm generate"),
    _use("chat", "talk to a model directory", f"{RUN_SCRIPT} --run_mode chat"),
)
VERBS = {verb.name: verb for verb in TABLE}

USAGE = "usage: mindllm VERB [options]   (mindllm VERB --help lists the options of one)\n"
LAST = "also      --version; completion bash|zsh|fish prints a script for that shell\n"

_old_names: ContextVar[bool] = ContextVar("old_names", default=False)


@contextmanager
def by_old_names() -> Iterator[None]:
    """Have texts name commands as ``python -m toolkit.<tool>`` and ``run_llm.py``: the user came in by one of those."""
    token = _old_names.set(True)
    try:
        yield
    finally:
        _old_names.reset(token)


def uses_old_names() -> bool:
    """Return whether this command was called by an old name."""
    return _old_names.get()


def spelled(name: str) -> str:
    """Return how the user writes the verb ``name``: ``mindllm search``, or ``python -m toolkit.tune`` where that is in use."""
    return VERBS[name].old if _old_names.get() else f"mindllm {name}"


def former(old: str) -> Callable[[Sequence[str] | None], int]:
    """Return the ``main`` of the verb that was called ``old``, such as ``toolkit.tune``; its texts keep that form."""
    verb = next(verb for verb in TABLE if verb.old == f"python -m {old}")

    def main(arguments: Sequence[str] | None = None) -> int:
        import sys

        with by_old_names():
            return verb.run(sys.argv[1:] if arguments is None else arguments)

    return main


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
