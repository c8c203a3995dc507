"""``graph``: one HTML page of a compiled rank; needs nothing but a browser.

Cells are boxes to open in a list, and beside it one part (a layer, the embedding, the loss) is drawn as operators and edges.
Cytoscape.js draws it and dagre lays it out; both stand in ``bundled/`` with their licences and go into the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CONSTANT, CompiledGraph, Node
from mindllm.compiled.graph.cost import Cost, cost
from mindllm.compiled.graph.operators import LAYER, ORDERING, Operators
from mindllm.compiled.inspect.comm import cause_of
from mindllm.compiled.inspect.recompute import KeptTensors
from mindllm.compiled.inspect.tables import count_text, size_text
from mindllm.files import atomic_open
from mindllm.terminal.page import beside_proof, fill, json_markup, mark

EXCHANGED = COLLECTIVES - {"Send", "Receive"}
TEMPLATE = Path(__file__).with_name("page.html")
BUNDLED = Path(__file__).with_name("bundled")
LIBRARIES = ("cytoscape.min.js", "cytoscape-dagre.min.js")


def write_page(graph: CompiledGraph, title: str, path: Path) -> None:
    """Write the page; the file is whole or absent."""
    text = render_page(graph, title, beside_proof(path.parent))
    with atomic_open(path) as file:
        file.write(text)


def render_page(graph: CompiledGraph, title: str, to_proof: bool = False) -> str:
    """Return the page as HTML; ``to_proof``: with the way back to the proof of the run beside it."""
    scripts = "\n".join(f"<script>{(BUNDLED / name).read_text(encoding='utf-8')}</script>" for name in LIBRARIES)
    data = json_markup(page_data(graph))
    markup = {"mark": mark("graph of a rank", to_proof), "libraries": scripts, "data": data}
    return fill(TEMPLATE, {"title": title}, markup)


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
    """Return the part of the drawing: a layer by its path, other cells by their first two levels."""
    layer = LAYER.match(place)
    return place[: layer.end()].rstrip(".") if layer else ".".join(place.split(".")[:2]) or "step"


def _spent(spent: Cost) -> Iterator[str]:
    if spent.flops:
        yield f"{count_text(spent.flops)}FLOPs"
    if spent.bytes:
        yield size_text(spent.bytes)
