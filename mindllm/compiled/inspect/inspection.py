"""A compiled graph and what can be asked of it: every question has an answer that prints, goes into JSON, and shows as HTML.

``graph`` is one HTML page of a compiled rank and needs nothing but a browser. Cells are boxes to open in a list, and beside it
one part (a layer, the embedding, the loss) is drawn as operators and edges. Cytoscape.js draws it and dagre lays it out; both
stand in ``bundled/`` with their licences and go into the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CONSTANT, CompiledGraph, Node
from mindllm.compiled.graph.cost import Cost, cost
from mindllm.compiled.graph.operators import LAYER, ORDERING, Operators
from mindllm.compiled.inspect.comm import cause_of
from mindllm.compiled.inspect.saved_activations import KeptTensors
from mindllm.compiled.inspect.source import Inspected
from mindllm.compiled.inspect.summary import DEFAULT_DEPTH, summarise, summary_parts
from mindllm.compiled.inspect.tables import count_text, size_text
from mindllm.errors import UserError
from mindllm.files import atomic_open
from mindllm.results import Result
from mindllm.terminal.page import beside_proof, fill, json_markup, mark

if TYPE_CHECKING:
    from mindllm.results import Part

EXCHANGED = COLLECTIVES - {"Send", "Receive"}
TEMPLATE = Path(__file__).with_name("page.html")
BUNDLED = Path(__file__).with_name("bundled")
LIBRARIES = ("cytoscape.min.js", "cytoscape-dagre.min.js")


def write_page(graph: CompiledGraph, title: str, path: Path) -> None:
    """Writes the page; the file is whole or absent."""
    scripts = "\n".join(f"<script>{(BUNDLED / name).read_text(encoding='utf-8')}</script>" for name in LIBRARIES)
    head = mark("graph of a rank", beside_proof(path.parent))
    markup = {"mark": head, "libraries": scripts, "data": json_markup(page_data(graph))}
    text = fill(TEMPLATE, {"title": title}, markup)
    with atomic_open(path) as file:
        file.write(text)


def page_data(graph: CompiledGraph) -> dict[str, Any]:
    """Operators of every function in order; tables of texts that many share keep the page small.

    Rows are numbered through all functions: ``e`` are the rows whose results one uses, ``r2`` the row that it repeats.
    """
    operators = Operators(graph)
    drawn = [node for function in graph.functions for node in function.nodes if _is_drawn(node)]
    number = {node.name: index for index, node in enumerate(drawn)}
    repeated = KeptTensors(operators).repetitions
    places: dict[str, int] = {}
    lines: dict[str, int] = {}
    functions = []
    for function in graph.functions:
        rows = []
        for node in function.nodes:
            if not _is_drawn(node):
                continue
            place = operators.place(node)
            spent = cost(graph, node)
            source = [f"{line}: {line.text}" for line in graph.source(node)[-2:]]
            rows.append(
                {
                    "o": node.op,
                    "n": node.instance,
                    "p": places.setdefault(place, len(places)),
                    "q": part_of(place),
                    "m": -1 if node.micro_batch is None else node.micro_batch,
                    "e": sorted({number[source.name] for source in operators.producers(node) if source.name in number}),
                    "r2": number[repeated[node.name].name] if node.name in repeated else -1,
                    "a": [name for name in map(operators.parameter, node.inputs) if name],
                    "f": operators.phase(node),
                    "c": cause_of(operators, node) if node.op in COLLECTIVES else "",
                    "r": list(node.ranks),
                    "t": " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in node.tensors),
                    "s": str(node.input_strategy) if node.input_strategy else "",
                    "w": operators.weight(node) if node.op in EXCHANGED else "",
                    "x": ", ".join(_spent(spent)),
                    "l": [lines.setdefault(text, len(lines)) for text in source],
                }
            )
        title = "step" if function is graph.step else f"{function.role}: {function.cell}"
        functions.append({"name": function.name, "title": title, "runs": graph.executions[function.name], "rows": rows})
    return {"rank": graph.rank, "functions": functions, "places": list(places), "lines": list(lines)}


def _is_drawn(node: Node) -> bool:
    return node.op not in ORDERING and node.op != CONSTANT


def part_of(place: str) -> str:
    """What is drawn together: a layer by its path, other cells by the first two levels of theirs."""
    layer = LAYER.match(place)
    return place[: layer.end()].rstrip(".") if layer else ".".join(place.split(".")[:2]) or "step"


def _spent(spent: Cost) -> Iterator[str]:
    if spent.flops:
        yield f"{count_text(spent.flops)}FLOPs"
    if spent.bytes:
        yield size_text(spent.bytes)


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
        from mindllm.compiled.inspect.show import show

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
        from mindllm.compiled.inspect.diff import compare, comparison_parts

        found = compare(self.graph, other.graph)
        return Answer("diff", found, tuple(comparison_parts(found, (self.name, other.name))))

    def write_page(self, path: Path | str) -> None:
        """Write a page to look at the graph."""
        from mindllm.compiled.inspect.inspection import write_page

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
