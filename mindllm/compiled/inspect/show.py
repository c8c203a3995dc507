"""``show SCOPE``: the familiar text of one part of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mindllm.compiled.graph.compiled_graph import (
    CALL,
    CONSTANT,
    CompiledGraph,
    Function,
    Node,
    TensorType,
    TupleType,
    ValueType,
    local_name,
)
from mindllm.compiled.graph.operators import ORDERING, Operators
from mindllm.errors import UserError, nearest

LITERALS = {bool: "Bool", int: "I64", float: "F32"}


def show(graph: CompiledGraph, scope: str, sources: bool = True, everything: bool = False) -> Iterator[str]:
    """Lines of the operators whose cell or full name ``scope`` names: whole, its beginning, or a pattern with ``*``.

    Raises:
        UserError: nothing has this name.
    """
    operators = Operators(graph)
    found = 0
    for function in graph.functions:
        chosen = [
            node
            for node in function.nodes
            if node.op != CONSTANT
            and (everything or node.op not in ORDERING)
            and _named(scope, (operators.place(node), node.path, node.scope))
        ]
        if chosen:
            yield f"subgraph @{function.name}: runs {graph.executions[function.name]} times per step"
            numbers = {node.name: index for index, node in enumerate(_without_constants(function))}
            for node in chosen:
                yield from _text(graph, node, numbers, sources)
        found += len(chosen)
    if not found:
        places = {operators.place(node) for node in operators.nodes}
        raise UserError(f"no operator in '{scope}'{nearest(scope, places)}")


def _without_constants(function: Function) -> list[Node]:
    return [node for node in function.nodes if node.op != CONSTANT]


def _named(scope: str, names: tuple[str, ...]) -> bool:
    return any(
        name == scope or name.startswith((scope + ".", scope + "/")) or fnmatchcase(name, scope) for name in names
    )


def _text(graph: CompiledGraph, node: Node, numbers: Mapping[str, int], sources: bool) -> Iterator[str]:
    inputs = ", ".join(_reference(graph, name, numbers) for name in node.inputs)
    target = f"call @{local_name(node.callee)}" if node.op == CALL else node.op
    instance = f" {{instance name: {node.instance}}}" if node.instance else ""
    marks = _marks("primitive_attrs", node.attributes) + _marks("cnode_attrs", node.primal)
    label = node.name.split(":")[1] if ":" in node.name else node.name
    yield f"  %{numbers[node.name]}({label}) = {target}({inputs}){instance}{marks}"
    given = ", ".join(_type_text(graph.types[name]) if name in graph.types else "<null>" for name in node.inputs)
    yield f"      : ({given}) -> ({_type_text(node.type)})"
    yield f"      # Fullname with scope: ({node.scope})"
    if sources:
        yield from (f"      # In file {line}/ {line.text}" for line in graph.source(node))


def _reference(graph: CompiledGraph, name: str, numbers: Mapping[str, int]) -> str:
    if name in graph.constants:
        return _literal(graph.constants[name])
    if name in numbers:
        return f"%{numbers[name]}"
    return f"@{name}" if graph.is_function(name) else f"%{local_name(name)}"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})"
    if type(value) in LITERALS:
        return f"{LITERALS[type(value)]}({int(value) if isinstance(value, bool) else value})"
    if isinstance(value, str):
        return f'"{value}"'
    shape = getattr(value, "shape", None)
    return f"Tensor(shape={list(shape)})" if shape is not None else str(value)


def _marks(title: str, attributes: Mapping[str, Any]) -> str:
    if not attributes:
        return ""
    return f" {title}: {{{', '.join(f'{name}: {_literal(value)}' for name, value in attributes.items())}}}"


def _type_text(kind: ValueType) -> str:
    if isinstance(kind, TensorType):
        return f"<Tensor[{kind.dtype}], ({', '.join(map(str, kind.shape))})>"
    if isinstance(kind, TupleType):
        return f"<Tuple[{', '.join(map(_type_text, kind.items))}]>"
    return f"<{getattr(kind, 'kind', 'Func')}>"
