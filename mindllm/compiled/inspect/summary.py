"""Views of compiled graphs: a summary by module, the text of a scope, and the differences of two graphs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import (
    CALL,
    COLLECTIVES,
    CONSTANT,
    CompiledGraph,
    Function,
    Node,
    TensorType,
    TupleType,
    ValueType,
    local_name,
)
from mindllm.compiled.graph.cost import Cost, bytes_of, cost, step_cost, uncounted
from mindllm.compiled.graph.operators import ORDERING, PHASES, Operators, without_numbers
from mindllm.compiled.inspect.comm import exchanges
from mindllm.compiled.inspect.recompute import KeptTensors
from mindllm.compiled.inspect.tables import count_text, size_text, table_parts
from mindllm.compiled.simulation.memory_tracker import ACCUMULATOR_PREFIXES, MOMENTS
from mindllm.errors import UserError, nearest

if TYPE_CHECKING:
    from mindllm.results import Part

DEFAULT_DEPTH = 4
LARGEST = 12
KINDS = {**dict.fromkeys(MOMENTS, "state"), **dict.fromkeys(ACCUMULATOR_PREFIXES, "gradients")}
WEIGHTS, OTHER = "weights", "other"


def summarise(graph: CompiledGraph, depth: int = DEFAULT_DEPTH) -> dict[str, Any]:
    """Per step of this rank, by module (layers together) and by operator."""
    operators = Operators(graph)
    modules: dict[str, dict[str, Any]] = defaultdict(_row)
    kinds: dict[str, Cost] = defaultdict(Cost)
    counts: Counter[str] = Counter()
    for node in operators.nodes:
        if node.op in ORDERING:
            continue
        times = operators.times(node)
        spent = cost(graph, node) * times
        row = modules[_module(operators.place(node), depth)]
        row["operators"] += times
        row["flops"][operators.phase(node)] += spent.flops
        row["bytes"] += spent.bytes
        kinds[node.op] += spent
        counts[node.op] += times
    for name, parameter in graph.parameters.items():
        kind, owner = kind_of(name)
        module = _module(owner.rpartition(".")[0], depth)
        modules[module][kind] += bytes_of([TensorType(parameter.shape, parameter.dtype)])
    total = sum(kinds.values(), Cost())
    return {
        "rank": graph.rank,
        "operators": sum(counts.values()),
        "flops": total.flops,
        "matrix_flops": total.products,
        "bytes": total.bytes,
        "not_counted": list(uncounted(graph)),
        "weight_bytes": sum(row[WEIGHTS] for row in modules.values()),
        "modules": [{"module": name, **row} for name, row in sorted(modules.items())],
        "by_operator": [
            {"operator": op, "runs": counts[op], "flops": spent.flops, "bytes": spent.bytes}
            for op, spent in sorted(kinds.items(), key=lambda item: (-item[1].flops, -item[1].bytes))
        ],
    }


def summary_parts(summary: dict[str, Any]) -> Iterator[Part]:
    """Yield two tables."""
    phases = [phase for phase in PHASES if any(row["flops"][phase] for row in summary["modules"])]
    rows = [
        (
            row["module"] or "(step)",
            row["operators"],
            *(count_text(row["flops"][phase]) for phase in phases),
            size_text(row["bytes"]),
            *(size_text(row[kind]) for kind in (WEIGHTS, "state", "gradients")),
        )
        for row in summary["modules"]
    ]
    numbers = ["operators", *(f"FLOPs {phase}" for phase in phases), "bytes moved", WEIGHTS, "state", "gradients"]
    title = (
        f"rank {summary['rank']}: {summary['operators']} operators, {count_text(summary['flops'])}FLOPs "
        f"({count_text(summary['matrix_flops'])} in products), {size_text(summary['bytes'])} moved per step"
    )
    yield from table_parts(title, ["module", *numbers], rows, numbers)
    if summary["not_counted"]:
        yield f"operations of these are not known, and not in FLOPs: {', '.join(summary['not_counted'])}"
    kinds = [
        (row["operator"], row["runs"], count_text(row["flops"]), size_text(row["bytes"]))
        for row in summary["by_operator"][:LARGEST]
    ]
    yield from table_parts(
        "largest operators", ["operator", "runs", "FLOPs", "bytes moved"], kinds, ["runs", "FLOPs", "bytes moved"]
    )


def kind_of(name: str) -> tuple[str, str]:
    """Return the kind of a parameter, and the name of its weight."""
    for prefix, kind in KINDS.items():
        if name.startswith(prefix):
            return kind, name.removeprefix(prefix)
    return (WEIGHTS if "." in name else OTHER), name


def _row() -> dict[str, Any]:
    return {"operators": 0, "flops": dict.fromkeys(PHASES, 0.0), "bytes": 0} | dict.fromkeys(
        (WEIGHTS, "state", "gradients", OTHER), 0
    )


def _module(place: str, depth: int) -> str:
    return ".".join(without_numbers(place).split(".")[:depth])


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


Key = tuple[str, str, str, str]
SIZES = ("bytes moved", "sent to other ranks", "parameters", "kept for the backward pass")


def compare(first: CompiledGraph, second: CompiledGraph) -> dict[str, Any]:
    """Return totals of both graphs, and rows of operators whose number or shapes differ."""
    one, other = _runs(first), _runs(second)
    rows = [
        {
            "phase": phase,
            "where": where,
            "operator": op,
            "name": name,
            "before": before,
            "after": after,
            "change": change,
        }
        for key in sorted(one.keys() | other.keys())
        for phase, where, op, name in [key]
        for before, after, change in [_change(one.get(key, Counter()), other.get(key, Counter()))]
        if change
    ]
    return {
        "totals": {name: [_totals(first)[name], _totals(second)[name]] for name in _totals(first)},
        "operators": rows,
        "parameters": _parameters(first, second),
    }


def comparison_parts(found: dict[str, Any], names: tuple[str, str]) -> Iterator[Part]:
    """Yield the differences as tables."""
    rows = []
    for name, (before, after) in found["totals"].items():
        text = size_text if name in SIZES else count_text
        share = f"{(after - before) / before:+.1%}" if before else "" if after == before else "new"
        rows.append((name, text(before), text(after), share))
    yield from table_parts("per step", ["", *names, "change"], rows, [*names, "change"])
    lines = [
        (
            row["phase"],
            row["where"] or "(step)",
            row["operator"],
            row["name"],
            row["before"],
            row["after"],
            row["change"],
        )
        for row in found["operators"]
    ]
    columns = ["phase", "where", "operator", "name", "before", "after", "change"]
    yield from table_parts(f"{len(lines)} differences between operators", columns, lines, ["before", "after"])
    shapes = [(row["parameter"], row["before"] or "-", row["after"] or "-") for row in found["parameters"]]
    yield from table_parts(f"{len(shapes)} differences between parameters", ["parameter", *names], shapes)


def _runs(graph: CompiledGraph) -> Mapping[Key, Counter[str]]:
    """Run per step by place (layers together), of each way an operator is run."""
    operators = Operators(graph)
    found: dict[Key, Counter[str]] = defaultdict(Counter)
    for node in operators.nodes:
        if node.op in ORDERING:
            continue
        name = "" if node.op in COLLECTIVES else node.instance
        key = (operators.phase(node), without_numbers(operators.place(node)), node.op, name)
        cut = f" cut {node.input_strategy}" if node.input_strategy else ""
        shapes = " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in node.tensors)
        found[key][shapes + cut] += operators.times(node)
    return found


def _change(before: Counter[str], after: Counter[str]) -> tuple[int, int, str]:
    """Run before and after, and what is different; "" for nothing."""
    if before == after:
        return before.total(), after.total(), ""
    if not before or not after:
        return before.total(), after.total(), "removed" if before else "added"
    gone, come = before - after, after - before
    if gone and come:
        return before.total(), after.total(), f"{next(iter(gone))} -> {next(iter(come))}"
    return before.total(), after.total(), f"{after.total() - before.total():+d} runs"


def _totals(graph: CompiledGraph) -> dict[str, float]:
    total, found = step_cost(graph), exchanges(graph)
    kept = KeptTensors(Operators(graph))
    return {
        "FLOPs": total.flops,
        "FLOPs in products": total.products,
        "bytes moved": total.bytes,
        "exchanges": sum(exchange.times for exchange in found),
        "sent to other ranks": sum(exchange.sent * exchange.times for exchange in found),
        "parameters": bytes_of(TensorType(held.shape, held.dtype) for held in graph.parameters.values()),
        "kept for the backward pass": kept.size(kept.kept()),
    }


def _parameters(first: CompiledGraph, second: CompiledGraph) -> list[dict[str, str]]:
    texts = [
        {name: f"{held.dtype}{list(held.shape)}" for name, held in graph.parameters.items()}
        for graph in (first, second)
    ]
    names = [name for name in dict.fromkeys([*texts[0], *texts[1]]) if texts[0].get(name) != texts[1].get(name)]
    return [{"parameter": n, "before": texts[0].get(n, ""), "after": texts[1].get(n, "")} for n in names]
