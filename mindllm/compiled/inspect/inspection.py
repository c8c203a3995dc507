"""A compiled graph and what can be asked of it: every question has an answer that prints, goes into JSON, and shows as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.inspect.source import Inspected
from mindllm.compiled.inspect.summary import DEFAULT_DEPTH, summarise, summary_parts
from mindllm.errors import UserError
from mindllm.results import Result

if TYPE_CHECKING:
    from mindllm.results import Part


@dataclass(frozen=True, repr=False)
class Answer(Result):
    """What a graph says to one question: ``values`` for programs, ``shown`` for people."""

    question: str
    values: Mapping[str, Any]
    shown: tuple[Part, ...]

    def summary(self) -> str:
        """Return the question."""
        return self.question

    def tree(self) -> dict[str, Any]:
        """Return the values."""
        return dict(self.values)

    def parts(self) -> Iterable[Part]:
        """Return what is shown."""
        return self.shown


@dataclass(frozen=True, repr=False)
class Inspection(Result):
    """The compiled graph of one rank. It prints as its operators, FLOPs, bytes and parameters by module.

    Attributes:
        inspected: the graph, its name, and its run where that is known.
    """

    inspected: Inspected

    @property
    def name(self) -> str:
        """What the graph is called."""
        return self.inspected.name

    @property
    def graph(self) -> CompiledGraph:
        """The graph itself."""
        return self.inspected.graph

    def summary(self) -> str:
        """Return the name of the graph."""
        return self.name

    def tree(self) -> dict[str, Any]:
        """Return the modules and operators of the graph, as ``inspect summary --json`` prints them."""
        return summarise(self.graph)

    def parts(self) -> Iterator[Part]:
        """Yield a table of modules and one of operators."""
        return summary_parts(self.tree())

    def modules(self, depth: int = DEFAULT_DEPTH) -> Answer:
        """Return operators, FLOPs, bytes and parameters by module, cells told apart down to ``depth`` levels."""
        found = summarise(self.graph, depth)
        return Answer("summary", found, tuple(summary_parts(found)))

    def show(self, scope: str, everything: bool = False) -> Answer:
        """Return the text of one part of the graph: of a cell, the beginning of a full name, or a pattern with ``*``.

        Raises:
            UserError: nothing has this name.
        """
        from mindllm.compiled.inspect.summary import show

        lines = list(show(self.graph, scope, everything=everything))
        return Answer(f"show {scope}", {"lines": lines}, ("\n".join(lines),))

    def communication(self, each: bool = False) -> Answer:
        """Return every exchange with other ranks, and its cause; alike ones share a row unless ``each`` has its own."""
        from mindllm.compiled.inspect.comm import as_json, exchange_parts, exchanges

        found = exchanges(self.graph)
        return Answer("comm", as_json(found), tuple(exchange_parts(found, each)))

    def redundant(self) -> Answer:
        """Return the layout changes nobody asked for, with the fix of each."""
        from mindllm.compiled.inspect.redundant import as_json, change_parts, layout_changes

        found = layout_changes(self.graph)
        return Answer("redundant", as_json(found), tuple(change_parts(found)))

    def recomputation(self) -> Answer:
        """Return what recomputation was asked for, really happens and saves, and why a pattern has no effect."""
        from mindllm.compiled.inspect.recompute import as_json, recomputation, recomputation_parts

        found = recomputation(self.inspected)
        return Answer("recompute", as_json(found), tuple(recomputation_parts(found)))

    def differences(self, other: Inspection) -> Answer:
        """Return what differs in ``other``: totals, operators, layouts, parameters."""
        from mindllm.compiled.inspect.summary import compare, comparison_parts

        found = compare(self.graph, other.graph)
        return Answer("diff", found, tuple(comparison_parts(found, (self.name, other.name))))

    def write_page(self, path: Path | str) -> None:
        """Write a page to look at the graph."""
        from mindllm.compiled.inspect.page import write_page

        write_page(self.graph, self.name, Path(path))

    def save(self, path: Path | str) -> None:
        """Keep the graph in a file.

        Raises:
            UserError: it is a text, which is readable as it is.
        """
        from mindllm.compiled.graph.file import save

        if not self.graph.mind_ir:
            raise UserError(f"{self.name}: a text graph cannot be kept; it is readable as it is")
        save(self.graph, Path(path))
