"""All ranks of a cluster in one process: each runs until it must exchange, and goes on once its whole group waits there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindllm.compiled.execute.exchange import RECEIVE, SEND, Deadlock, Exchange, complete, results
from mindllm.compiled.execute.rank_interpreter import RankInterpreter, Run

Sent = dict[tuple[int, int, int], deque[np.ndarray]]


class Lockstep:
    """One step of several ranks. Sends are kept until they are received; all other exchanges wait for their group."""

    def __init__(self, machines: Sequence[RankInterpreter], inputs: Mapping[int, Sequence[Any]]) -> None:
        self.runs: dict[int, Run] = {machine.rank: machine.run(*inputs[machine.rank]) for machine in machines}
        self.waiting: dict[int, Exchange] = {}
        self.sent: Sent = {}
        self.outputs: dict[int, Any] = {}

    def run(self) -> dict[int, Any]:
        """Execute the step, and return the outputs of every rank.

        Raises:
            Deadlock: no rank can go on, or something was sent that nobody received.
        """
        ready: deque[tuple[int, np.ndarray | None]] = deque((rank, None) for rank in self.runs)
        while ready:
            rank, answer = ready.popleft()
            self._advance(rank, answer)
            ready.extend(self._answers(rank))
        if self.waiting or any(self.sent.values()):
            what = "no rank can go on" if self.waiting else "what a rank sent was never received"
            raise Deadlock(f"{what}:\n" + "\n".join(f"  {line}" for line in self._situation()))
        return self.outputs

    def _advance(self, rank: int, answer: np.ndarray | None) -> None:
        """Run a rank to its next exchange, or to its end."""
        try:
            self.waiting[rank] = self.runs[rank].send(answer)
        except StopIteration as end:
            self.outputs[rank] = end.value

    def _answers(self, rank: int) -> list[tuple[int, np.ndarray | None]]:
        """Return the ranks that can continue now that ``rank`` has arrived, with their results."""
        exchange = self.waiting.get(rank)
        if exchange is None:
            return []
        if exchange.op == SEND:
            return self._send(exchange)
        if exchange.op == RECEIVE:
            return self._receive(rank)
        group = complete(self.waiting, rank)
        if group is None:
            return []
        for other in group:
            del self.waiting[other.rank]
        return list(zip((other.rank for other in group), results(group), strict=True))

    def _send(self, exchange: Exchange) -> list[tuple[int, np.ndarray | None]]:
        value = self.waiting.pop(exchange.rank).value
        self.sent.setdefault(exchange.channel, deque()).append(np.asarray(value))
        return [(exchange.rank, np.asarray(value)), *self._receive(exchange.peer)]

    def _receive(self, rank: int) -> list[tuple[int, np.ndarray | None]]:
        """Return a rank that waits for a message that was sent."""
        exchange = self.waiting.get(rank)
        if exchange is None or exchange.op != RECEIVE or not self.sent.get(exchange.channel):
            return []
        del self.waiting[rank]
        return [(rank, self.sent[exchange.channel].popleft())]

    def _situation(self) -> list[str]:
        """Describe what every rank waits for, which ones have ended, and messages that were not received."""
        lines = {rank: exchange.describe() for rank, exchange in self.waiting.items()}
        lines |= {rank: f"rank {rank} has finished its step" for rank in self.outputs}
        unreceived = [
            f"rank {source} has sent to rank {destination} what it has not received (tag {tag})"
            for (source, destination, tag), values in sorted(self.sent.items())
            if values
        ]
        return [lines[rank] for rank in sorted(lines)] + unreceived
