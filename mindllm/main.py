"""The command ``mindllm``: finds the verb, imports what that one needs, and runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mindllm.process.interrupts import own_interrupts

COMPLETION = "completion"
HELP = ("-h", "--help", "help")
SHORT = {"calibrate": ("time", "calibrate")}
"""What is a verb below a verb, by the name that people try alone."""
SERVED = "serving is out of scope; vLLM serves what mindllm weights export or merge writes"
OF_OTHERS = {
    **dict.fromkeys(("infer", "inference"), "write mindllm chat MODEL, or mindllm generate MODEL --prompt TEXT"),
    **dict.fromkeys(("sft", "lora", "rlhf", "dpo", "kto", "fine-tune"), "write mindllm finetune MODEL DATA"),
    **dict.fromkeys(("merge", "merge-lora", "merge_lora"), "write mindllm weights merge ADAPTER DIRECTORY"),
    **dict.fromkeys(("deploy", "serve", "server", "api", "app", "web-ui", "webui", "webchat"), SERVED),
    "export": "write mindllm weights export CHECKPOINT DIRECTORY",
    "import": "write mindllm weights import WEIGHTS DIRECTORY",
    "pt": "write mindllm pretrain --like NETWORK TEXT",
    "download": "write mindllm fetch ORGANISATION/MODEL",
    **dict.fromkeys(("verify", "cluster_check"), "write mindllm check RUN"),
    **dict.fromkeys(("tune", "tuner"), "write mindllm search RUN"),
    **dict.fromkeys(("pipeline-balance", "pipeline_balance"), "write mindllm plan RUN"),
    **dict.fromkeys(("ir-inspect", "ir_inspect"), "write mindllm inspect"),
    "run_llm.py": "write mindllm train RUN",
}
"""Commands of ms-swift, LLaMA-Factory and others, and what does their work here."""


def command() -> None:
    """Run the installed command ``mindllm``."""
    own_interrupts()  # before anything is imported that takes time
    from mindllm.command import run_command

    run_command(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb, or say what there is; return the exit code."""
    from mindllm.cli.registry import VERBS

    first, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if first in SHORT:
        first, *rest = *SHORT[first], *rest
    if first in VERBS:
        return VERBS[first].run(rest)
    if first in HELP:
        return _help(rest)
    if first == "--version":
        sys.stdout.write(version())
        return 0
    if first == COMPLETION:
        from mindllm.cli.completion import main as complete

        return complete(rest)
    raise _unknown(first)


def _help(rest: Sequence[str]) -> int:
    """Print all verbs, or the options of the one that is named: ``mindllm help search``."""
    if rest[:1] and not rest[0].startswith("-"):
        return main([rest[0], "--help"])
    from mindllm.cli.registry import overview

    sys.stdout.write(overview())
    return 0


def version() -> str:
    """Return the versions of mindllm and MindSpore, which is asked for without importing it."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    import mindllm

    try:
        installed = version_of("mindspore")
    except PackageNotFoundError:
        installed = "not installed"
    return f"mindllm {mindllm.__version__}\nMindSpore {installed}\n"


def _unknown(word: str) -> Exception:
    from mindllm.cli.registry import VERBS
    from mindllm.errors import LONGEST_PART, UserError, bounded, nearest

    shown = bounded(word, LONGEST_PART)
    if word.startswith("-"):
        hint = nearest(word, ["--help", "--version"]).partition("; valid")[0]
        return UserError(
            f"{shown}: a verb comes first{hint or ', as in: mindllm train --config FILE'}; mindllm --help lists all"
        )
    if word in OF_OTHERS:
        return UserError(f"{shown}: no such verb; {OF_OTHERS[word]}; mindllm --help lists all")
    hint = nearest(word, [*VERBS, COMPLETION]).partition("; valid")[0]
    return UserError(f"{shown}: no such verb{hint}; mindllm --help lists all")


if __name__ == "__main__":
    command()
