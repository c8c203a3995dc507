"""How many ranks a job written for a cluster has on each node, and what is run there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mindllm.errors import UserError
from mindllm.launch.script import config_word
from mindllm.launch.start import Launch

DEVICES_OF_A_NODE = 8  # as Atlas 800T A2 and Atlas 900 have them


def nodes_of(workers: int, local_workers: int | None) -> tuple[int, int]:
    """Return nodes and ranks of each; raises UserError where ranks cannot be shared evenly."""
    local = local_workers or min(workers, DEVICES_OF_A_NODE)
    if workers % local:
        raise UserError(
            f"{workers} processes are no multiple of {local} on each node; give --local_workers, the devices used on a node"
        )
    return workers // local, local


def launch_words(wanted: Launch, quoted: str, defaults: Launch, python: str) -> list[str]:
    """Return the command of every task: ``mindllm launch``, which asks the scheduler for the rest.

    Options are left out where they are those of ``defaults``; ``quoted`` is the command as a person gave it, ``python`` the
    interpreter of the nodes.
    """
    words = [python, "-m", "mindllm", "launch", f"--workers={wanted.workers}"]
    for name in ("restart", "port", "timeout", "log_dir"):
        if (value := getattr(wanted, name)) != getattr(defaults, name):
            words.append(f"--{name}={value}")
    if wanted.book is not None:
        words += [f"--book={wanted.book.path}", f"--patience={wanted.patience:g}"]
    if wanted.shared_dir != wanted.log_dir:
        words.append(f"--shared_dir={wanted.shared_dir}")
    return [*words, quoted]


def name_of(command: Sequence[str]) -> str:
    """Return a name of a job for any scheduler: of the YAML's file, or of the script, in letters, digits and hyphens."""
    named = config_word(command)
    first = named[2] if named else command[0]
    name = re.sub(r"[^a-z0-9]+", "-", Path(first).stem.lower()).strip("-")
    return name[:40].strip("-") or "run"
