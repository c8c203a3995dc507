"""``summary``: operators, operations, bytes and parameters by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import CompiledGraph, TensorType
from mindllm.compiled.graph.cost import Cost, bytes_of, cost, uncounted
from mindllm.compiled.graph.operators import ORDERING, PHASES, Operators, without_numbers
from mindllm.compiled.inspect.tables import count_text, size_text, table_parts
from mindllm.compiled.simulation.memory_tracker import ACCUMULATOR_PREFIXES, MOMENTS

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
    """As two tables."""
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
    """What a parameter is, and the name of the weight it belongs to."""
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
