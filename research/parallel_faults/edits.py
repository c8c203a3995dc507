"""Edits of compiled graphs, as a wrong strategy or a wrong compiler would make them: what stands in the place of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mindllm.compiled.graph.compiled_graph import CONSTANT, CompiledGraph, Node, OtherType

Edit = Callable[[CompiledGraph, Node], Sequence[Node]]
Where = Callable[[CompiledGraph, Node], bool]


def edited(graph: CompiledGraph, scopes: frozenset[str], fits: Where, edit: Edit) -> CompiledGraph:
    """A copy of a graph with ``edit`` made to the nodes of these scopes that it ``fits``; the graph itself where it has none."""
    chosen = {node.name for node in graph.nodes() if node.scope in scopes and fits(graph, node)}
    if not chosen:
        return graph
    functions = tuple(
        replace(
            function,
            nodes=tuple(
                new for node in function.nodes for new in (edit(graph, node) if node.name in chosen else [node])
            ),
        )
        for function in graph.functions
    )
    return replace(graph, functions=functions)


def constant(node: Node, name: str, value: Any) -> Node:
    """A constant of a name that no other node has."""
    kind = "FLOAT" if isinstance(value, float) else "TUPLE" if isinstance(value, tuple) else "INT64"
    return Node(CONSTANT, f"{node.name}_planted_{name}", (), OtherType(kind), "", {}, value=value)


def dropped(graph: CompiledGraph, node: Node) -> list[Node]:
    """Its first operand in its place."""
    return [replace(node, op="TensorMove", inputs=node.inputs[:1], attributes={})]


def second_operand(graph: CompiledGraph, node: Node) -> list[Node]:
    """Its second operand in its place."""
    return [replace(node, op="TensorMove", inputs=node.inputs[1:2], attributes={})]


def twice(graph: CompiledGraph, node: Node) -> list[Node]:
    """Done two times over."""
    once = replace(node, name=f"{node.name}_once")
    return [once, replace(node, inputs=(once.name, *node.inputs[1:]))]


def scaled(factor: float) -> Edit:
    """What it yields, times a factor."""

    def edit(graph: CompiledGraph, node: Node) -> list[Node]:
        before, by = replace(node, name=f"{node.name}_before"), constant(node, "factor", factor)
        return [before, by, replace(node, op="Muls", inputs=(before.name, by.name), attributes={})]

    return edit


def operand_scaled(index: int, factor: float) -> Edit:
    """One of its operands, times a factor."""

    def edit(graph: CompiledGraph, node: Node) -> list[Node]:
        by, inputs = constant(node, "factor", factor), list(node.inputs)
        product = replace(node, op="Muls", name=f"{node.name}_times", attributes={}, inputs=(inputs[index], by.name))
        inputs[index] = product.name
        return [by, replace(product, type=OtherType("any")), replace(node, inputs=tuple(inputs))]

    return edit


def with_attributes(**attributes: Any) -> Edit:
    """The same operator with other attributes."""
    return lambda graph, node: [replace(node, attributes={**node.attributes, **attributes})]


def reversed_ranks(graph: CompiledGraph, node: Node) -> list[Node]:
    """The same exchange with the ranks of its group in the other order."""
    return [replace(node, attributes={**node.attributes, "group_rank_ids": tuple(reversed(node.ranks))})]


def other_group(graph: CompiledGraph, node: Node) -> list[Node]:
    """The same exchange in another group of as many ranks that the rank belongs to; where there is none, in none."""
    others = [
        ranks for ranks in graph.groups.values() if len(ranks) == len(node.ranks) and set(ranks) != set(node.ranks)
    ]
    if not others:
        return dropped(graph, node)
    name = "planted_" + "_".join(map(str, others[0]))
    return [replace(node, attributes={**node.attributes, "group_rank_ids": others[0], "group": name})]


def swapped_operands(graph: CompiledGraph, node: Node) -> list[Node]:
    """Its first two operands in the other order."""
    first, second, *others = node.inputs
    return [replace(node, inputs=(second, first, *others))]


def with_constant(index: int, value: Any) -> Edit:
    """One of its operands a constant."""

    def edit(graph: CompiledGraph, node: Node) -> list[Node]:
        known = constant(node, "value", value)
        return [known, replace(node, inputs=(*node.inputs[:index], known.name, *node.inputs[index + 1 :]))]

    return edit


def first_part(graph: CompiledGraph, node: Node) -> list[Node]:
    """A slice that begins at the first element on every rank."""
    begin, end = (graph.constants[name] for name in node.inputs[1:3])
    moved = (
        constant(node, "begin", tuple(0 for _ in begin)),
        constant(node, "end", tuple(last - first for first, last in zip(begin, end, strict=True))),
    )
    return [*moved, replace(node, inputs=(node.inputs[0], moved[0].name, moved[1].name, *node.inputs[3:]))]


def left_out(graph: CompiledGraph, node: Node) -> list[Node]:
    """An update that is not made."""
    return [replace(node, op="Depend")]
