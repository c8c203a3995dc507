"""``diff A B``: what another configuration, version or rank changed: totals, operators, layouts, parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import COLLECTIVES, CompiledGraph, TensorType
from mindllm.compiled.graph.cost import bytes_of, step_cost
from mindllm.compiled.graph.operators import ORDERING, Operators, without_numbers
from mindllm.compiled.inspect.comm import exchanges
from mindllm.compiled.inspect.saved_activations import KeptTensors
from mindllm.compiled.inspect.tables import count_text, size_text, table_parts

if TYPE_CHECKING:
    from mindllm.results import Part

Key = tuple[str, str, str, str]
SIZES = ("bytes moved", "sent to other ranks", "parameters", "kept for the backward pass")


def compare(first: CompiledGraph, second: CompiledGraph) -> dict[str, Any]:
    """Totals of both, and rows of operators that are in one of them only, more often in one, or of other shapes."""
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
    """As tables."""
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
    """Runs per step by place (layers together), of each way an operator is run."""
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
    """Runs before and after, and what is different; "" for nothing."""
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
