"""The command ``mindllm``: finds the verb, imports what it needs, and runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mindllm.process.interrupts import own_interrupts

COMPLETION = "completion"
HELP = ("-h", "--help", "help")
SHORT = {"calibrate": ("time", "calibrate")}
"""Subcommands that are also accepted as verbs."""
SERVE = "mindllm does not serve models; export or merge with mindllm weights, and serve with vLLM"
FOREIGN_VERBS = {
    **dict.fromkeys(("infer", "inference"), "use mindllm chat MODEL, or mindllm generate MODEL --prompt TEXT"),
    **dict.fromkeys(("sft", "lora", "rlhf", "dpo", "kto", "fine-tune"), "use mindllm finetune MODEL DATA"),
    **dict.fromkeys(("merge", "merge-lora", "merge_lora"), "use mindllm weights merge ADAPTER DIRECTORY"),
    **dict.fromkeys(("deploy", "serve", "server", "api", "app", "web-ui", "webui", "webchat"), SERVE),
    "export": "use mindllm weights export CHECKPOINT DIRECTORY",
    "import": "use mindllm weights import WEIGHTS DIRECTORY",
    "pt": "use mindllm pretrain --like NETWORK TEXT",
    "download": "use mindllm fetch ORGANIZATION/MODEL",
    **dict.fromkeys(("verify", "cluster_check"), "use mindllm check RUN"),
    **dict.fromkeys(("tune", "tuner"), "use mindllm search RUN"),
    **dict.fromkeys(("pipeline-balance", "pipeline_balance"), "use mindllm plan RUN"),
    **dict.fromkeys(("ir-inspect", "ir_inspect"), "use mindllm inspect"),
    "run_llm.py": "use mindllm train RUN",
}
"""Commands of ms-swift, LLaMA-Factory and others, and the equivalent of mindllm."""


def command() -> None:
    """Run the installed command ``mindllm``."""
    own_interrupts()  # before slow imports
    from mindllm.command import run_command

    run_command(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb, or print the overview; return the exit code."""
    from mindllm.cli.registry import ALIASES, VERBS, overview

    first, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if first in SHORT:
        first, *rest = *SHORT[first], *rest
    first = ALIASES.get(first, first)
    if first in VERBS:
        return VERBS[first].run(rest)
    if first in HELP and rest[:1] and not rest[0].startswith("-"):  # mindllm help search
        return main([rest[0], "--help"])
    if first in HELP:
        sys.stdout.write(overview())
        return 0
    if first == "--version":
        sys.stdout.write(version())
        return 0
    if first == COMPLETION:
        from mindllm.cli.completion import main as complete

        return complete(rest)
    raise _unknown_verb(first)


def version() -> str:
    """Return the versions of mindllm and MindSpore, without importing MindSpore."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    import mindllm

    try:
        installed = version_of("mindspore")
    except PackageNotFoundError:
        installed = "not installed"
    return f"mindllm {mindllm.__version__}\nMindSpore {installed}\n"


def _unknown_verb(word: str) -> Exception:
    from mindllm.cli.registry import VERBS
    from mindllm.errors import LONGEST_PART, UserError, bounded, nearest

    shown = bounded(word, LONGEST_PART)
    if word.startswith("-"):
        hint = nearest(word, ["--help", "--version"]).partition("; valid")[0]
        hint = hint or "; example: mindllm train run.yaml"
        return UserError(f"{shown}: a verb must come first{hint}; mindllm --help lists all")
    hint = f"; {FOREIGN_VERBS[word]}" if word in FOREIGN_VERBS else ""
    hint = hint or nearest(word, [*VERBS, COMPLETION]).partition("; valid")[0]
    return UserError(f"{shown}: unknown verb{hint}; mindllm --help lists all")


if __name__ == "__main__":
    command()
