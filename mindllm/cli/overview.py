"""What ``mindllm --help`` prints: every verb on one screen of 80 columns and 24 lines, by what people want."""

from __future__ import annotations

from mindllm.cli.registry import TABLE

USAGE = "usage: mindllm VERB [options]   (mindllm VERB --help lists the options of one)\n"
LAST = "also      --version; completion bash|zsh|fish prints a script for that shell\n"


def overview() -> str:
    """Return the help: one line for each verb, the name of its group before the first of it."""
    lines, before = [USAGE, "\n"], ""
    for verb in TABLE:
        group = "" if verb.group == before else verb.group
        lines.append(f"{group:<10}{verb.name:<12}{verb.help}\n")
        before = verb.group
    return "".join([*lines, LAST])
