"""A process that Slurm's ``srun`` has started: which task of how many it is, and where the first one is reached.

The variables are those of srun(1), "OUTPUT ENVIRONMENT VARIABLES". A batch script has some of them and is no task: what tells a
step from it is SLURM_STEP_NUM_TASKS.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from mindllm.errors import UserError
from mindllm.launch.clusters.placement import Placement

SLURM = "Slurm"
STEP_TASKS, TASK, LOCAL_TASK, NODES = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"
FIRST_PORT, PORT_PAIRS = 20000, 6000  # below those Linux gives to outgoing connections, and in pairs
ASK_SECONDS = 30.0
MOST_NODES = 1 << 16
Find = Callable[[str], str]


def slurm_task(environment: Mapping[str, str], find: Find | None = None) -> Placement | None:
    """The task of a step of Slurm that this process is; None where it is none.

    MASTER_ADDR and MASTER_PORT, where a script has set them, come before what Slurm says. ``find`` makes an address of the name
    of a node.

    Raises:
        UserError: a variable is missing or no number, or the first node cannot be found.
    """
    if STEP_TASKS not in environment or TASK not in environment:
        return None
    tasks, task, local = (_number(environment, name) for name in (STEP_TASKS, TASK, LOCAL_TASK))
    job, step = (_number(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    address = environment.get("MASTER_ADDR", "")
    if not address and tasks > 1:
        address = (find or address_of)(next(hosts(environment.get(NODES, ""))))
    given = environment.get("MASTER_PORT")
    port = FIRST_PORT + 2 * ((job + step) % PORT_PAIRS) if given is None else _number(environment, "MASTER_PORT")
    counts = re.findall(r"(?<!x)\b\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # 8(x2),4
    several = any(int(count) > 1 for count in counts)
    return Placement(SLURM, tasks, task, local, address or "127.0.0.1", port, f"slurm-{job}.{step}", several)


def hosts(text: str) -> Iterator[str]:
    """Yield the nodes of a host list of Slurm, in its order: ``rack[1-2]n[01-03,7],login`` are nine.

    Raises:
        UserError: it is no host list, or names none.
    """
    if not text or "\n" in text:
        raise _no_hosts(text)
    for word in _words(text):
        yield from _expanded(word, text)


def address_of(host: str) -> str:
    """The address of a node: that of its name, or, where the name has none, what Slurm reaches the node by.

    Raises:
        UserError: neither is known, or it is an address that other nodes cannot reach.
    """
    with suppress(OSError):
        found = socket.gethostbyname(host)
        if not found.startswith("127."):
            return found
    node_addr = _node_addr(host)
    with suppress(OSError):
        if node_addr and node_addr != host:
            return socket.gethostbyname(node_addr)
    raise UserError(
        f"the address of {host}, the first node of this step, cannot be found: its name has none that others reach, and Slurm "
        "has no NodeAddr for it; set MASTER_ADDR in the job's script"
    )


def _node_addr(host: str) -> str:
    """What ``scontrol`` says that Slurm reaches a node by; empty where it says nothing."""
    try:
        said = subprocess.run(
            ["scontrol", "show", "node", host, "--oneliner"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=ASK_SECONDS,
            check=False,
        ).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else ""


def _words(text: str) -> Iterator[str]:
    """Yield what stands between commas that are not within brackets."""
    depth, word = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            yield word
            word = ""
        else:
            word += letter
    yield word


def _expanded(word: str, text: str) -> Iterator[str]:
    """Yield the hosts of ``a[1-2,5]b[3]``."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        if not word or "]" in word:
            raise _no_hosts(text)
        yield word
        return
    inside, closed, after = rest.partition("]")
    if not closed:
        raise _no_hosts(text)
    for number in _numbers(inside, text):
        for end in _expanded(after, text) if after else [""]:
            yield f"{before}{number}{end}"


def _numbers(inside: str, text: str) -> Iterator[str]:
    """Yield ``01, 02, 03, 7`` of ``01-03,7``: as many digits as the first of a span has."""
    for span in inside.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if not found or int(found[2] or found[1]) - int(found[1]) not in range(MOST_NODES):
            raise _no_hosts(text)
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}d}"


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not (value.isascii() and value.isdecimal()):
        raise UserError(
            f"{name} is {value!r} in the environment, not a number; start the run with srun, which sets what Slurm's tasks have"
        )
    return int(value)


def _no_hosts(text: str) -> UserError:
    return UserError(
        f"{NODES} is {text!r} in the environment: no host list of Slurm such as node[1-4]; set MASTER_ADDR"
    )
