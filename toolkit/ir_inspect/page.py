"""``graph``: one HTML page of a compiled rank, with cells as boxes to open; needs nothing but a browser."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindllm.compiled.cost import Cost, cost
from mindllm.compiled.graph import COLLECTIVES, CONSTANT, CompiledGraph
from mindllm.compiled.operators import ORDERING, Operators
from mindllm.files import atomic_open
from toolkit.ir_inspect.comm import cause_of
from toolkit.ir_inspect.tables import count_text, size_text

EXCHANGED = COLLECTIVES - {"Send", "Receive"}
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(graph: CompiledGraph, title: str, path: Path) -> None:
    """Writes the page; the file is whole or absent."""
    data = json.dumps(page_data(graph), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    text = TEMPLATE.read_text(encoding="utf-8").replace("{{title}}", html.escape(title)).replace("{{data}}", data)
    with atomic_open(path) as file:
        file.write(text)


def page_data(graph: CompiledGraph) -> dict[str, Any]:
    """Operators of every function in order; tables of texts that many share keep the page small."""
    operators = Operators(graph)
    places: dict[str, int] = {}
    lines: dict[str, int] = {}
    functions = []
    for function in graph.functions:
        rows = []
        for node in function.nodes:
            if node.op in ORDERING or node.op == CONSTANT:
                continue
            spent = cost(graph, node)
            source = [f"{line}: {line.text}" for line in graph.source(node)[-2:]]
            rows.append(
                {
                    "o": node.op,
                    "n": node.instance,
                    "p": places.setdefault(operators.place(node), len(places)),
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


def _spent(spent: Cost) -> Iterator[str]:
    if spent.flops:
        yield f"{count_text(spent.flops)}FLOPs"
    if spent.bytes:
        yield size_text(spent.bytes)
