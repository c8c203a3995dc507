"""What ``mindllm --help`` prints: every verb on one screen of 80 columns and 24 lines, by what people want."""

from __future__ import annotations

from mindllm.cli.registry import TABLE

USAGE = "usage: mindllm VERB [options]   (mindllm VERB --help lists the options of one)\n"
LAST = "also      --version; completion bash|zsh|fish prints a script for that shell\n"


def overview() -> str:
    """Return the help: a line for each verb, or for two that share one, the name of their group before the first of it."""
    lines, before, verbs = [USAGE], "", iter(TABLE)
    for verb in verbs:
        names, text = verb.name, verb.help
        if verb.with_next:
            names, text = f"{verb.name}, {next(verbs).name}", verb.with_next
        group = "" if verb.group == before else verb.group
        lines.append(f"{group:<10}{names:<18}{text}\n")
        before = verb.group
    return "".join([*lines, LAST])
