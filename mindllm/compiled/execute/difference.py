"""What is said of the first operator that differs: its place, what it was given, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from mindllm.compiled.execute.records import Record
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.operators import Operators


@dataclass(frozen=True)
class Difference:
    """The first operator that differs, and the operand of it that is a part of a sum nobody completed.

    ``suspect`` is the operand that is not what a single device has in its place; None where all are. ``moved`` is the exchange
    since which rows stand elsewhere than they should. ``since``: where the suspect was made of what nothing can be said of.
    ``loss``: what is wrong with the gradient of the loss, and the operators it begins with.
    """

    record: Record
    graph: CompiledGraph
    unfinished: Record | None = None
    over: tuple[int, ...] = ()
    suspect: Record | None = None
    moved: Record | None = None
    since: Record | None = None
    loss: tuple[str, tuple[Record, ...]] | None = None

    @cached_property
    def _operators(self) -> Operators:
        return Operators(self.graph)

    def describe(self) -> str:
        """Operator, rank, scope, strategy, source line, and what is wrong with its operand, if that is known."""
        node = self.record.node
        of = f" of {self.record.parameter}" if self.record.parameter else ""
        words = [f"{node.op}{of} on rank {self.record.rank} at {node.scope}", *self._made(self.record)]
        if self.unfinished is not None:
            words += self._operand("its operand is from", self.unfinished.origin)
            words.append(f"that operand was not added over ranks {listed(self.over)}")
        elif self.loss is not None:
            words.append(self.loss[0])
            for record in self.loss[1]:
                words += self._operand("that gradient begins with", record)
        else:
            first = next(iter(self.record.operands), None)
            for operand in filter(None, (self.suspect or first,)):
                words += self._operand("its operand is from", operand)
                if operand.origin is not operand:
                    words += self._operand("which has it from", operand.origin)
            if self.since not in (None, self.suspect) and self.since is not None:
                words += self._operand("what nothing can be said of begins with", self.since)
        if self.moved is self.record:
            words.append("it yields the right rows in another order, or those of another rank")
        elif self.moved is not None:
            words += self._operand(
                "it has the right rows in another order, or those of another rank, since", self.moved
            )
        return "\n  ".join(words)

    def _operand(self, how: str, record: Record) -> Iterator[str]:
        target = f" to {record.parameter}" if record.parameter else ""
        yield f"{how} {record.node.op}{target} at {record.node.scope}"
        yield from self._made(record)

    def _made(self, record: Record) -> Iterator[str]:
        """What an operator is the gradient of, its strategy, and the line that made it, as far as they are known.

        MindSpore gives a gradient the scope of any operator of its kind, so the forward operator alone says whose it is.
        """
        if record.node.backward and (forward := self._operators.forward(record.node)):
            yield f"in the backward pass of {forward.op} at {self._operators.place(forward) or forward.scope}"
        if record.node.input_strategy:
            yield f"strategy {record.node.input_strategy}"
        if lines := self.graph.source(record.node):
            yield f"source {lines[-1]}: {lines[-1].text}"


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words."""
    return ", ".join(map(str, ranks))
