"""How another node joins the first one, which may be started later: asked until it shows that it knows the job's secret."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from mindllm.errors import RunFailed
from mindllm.launch.handshake import ask
from mindllm.launch.lines import SignedLine
from mindllm.launch.secret import Secret, SecretMissing

PROOF_SECONDS = (
    30.0  # for node 0 to show that it knows the secret; it is busy while the job runs that this node was lost from
)
POLL_SECONDS, RETRY_SECONDS = 0.1, 1.0  # between two tries: where nobody answers, and where somebody else does


def join(
    address: tuple[str, int],
    secret: Secret,
    timeout: float,
    hello: Mapping[str, Any],
    told: Callable[[str], None] = lambda text: None,
    go_on: Callable[[], None] = lambda: None,
) -> SignedLine:
    """Connect to the first node and make sure that it is the first node; ``hello`` is said to it alone.

    Args:
        address: where it listens.
        secret: of the job.
        timeout: seconds after which it is given up.
        hello: the first message.
        told: is given a line for people while it is waited for, each once.
        go_on: is called now and then; what it raises ends the waiting.

    Raises:
        RunFailed: it was not found in time.
    """
    host, port = address
    said: set[str] = set()
    deadline, why = time.monotonic() + timeout, "it was not asked"
    while (left := deadline - time.monotonic()) > 0:
        go_on()
        try:
            line = _prove(address, secret, min(left, PROOF_SECONDS), go_on)
        except OSError as error:
            why = f"node 0 does not answer at {host} port {port}: {error}"
            time.sleep(POLL_SECONDS)
            continue
        except SecretMissing as missing:
            why = f"there is an answer at {host} port {port}, but {missing}"
        else:
            if line is not None:
                line.send(**hello)
                return line
            why = (
                f"what answers at {host} port {port} does not know the secret in {secret.path}: no node 0 of this job, "
                f"or one that sees another directory; {secret.called} must be one that all nodes share"
            )
        if why not in said:
            said.add(why)
            told(f"{why}; waiting")
        time.sleep(RETRY_SECONDS)
    raise RunFailed(f"this node could not join within {timeout:.0f} s: {why}")


def _prove(address: tuple[str, int], secret: Secret, seconds: float, go_on: Callable[[], None]) -> SignedLine | None:
    """Return a line to who knows the secret; None where he does not."""
    connection = socket.create_connection(address, timeout=seconds)
    try:
        line = ask(connection, secret.read(), seconds, go_on)
    except BaseException:
        connection.close()
        raise
    if line is None:
        connection.close()
    return line
