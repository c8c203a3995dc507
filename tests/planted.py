"""Mistakes planted into the files of compiled graphs, so that a command line meets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindllm.compiled.graph import mind_ir
from mindllm.compiled.graph.compiled_graph import Node
from mindllm.compiled.graph.file import load, save


def plant(path: Path, where: Callable[[Node], bool], change: Callable[[Any], None]) -> None:
    """Rewrites a graph file: ``change`` is given a protobuf primitive of its own for each node that ``where`` is true of."""
    graph = load(path)
    names = {node.name for node in graph.nodes() if where(node)}
    assert names
    model = mind_ir._parse(graph.mind_ir)
    primitives = {primitive.name: primitive for primitive in model.primitives}
    nodes = [node for function in (model.graph, *model.functions) for node in function.node]
    for node in nodes:
        if node.output[0] in names:
            own = model.primitives.add()
            own.CopyFrom(primitives[node.op_type.removeprefix(mind_ir.REFERENCE)])
            own.name = f"planted_{node.output[0]}"
            node.op_type = mind_ir.REFERENCE + own.name
            change(own)
    save(replace(graph, mind_ir=model.SerializeToString()), path)
