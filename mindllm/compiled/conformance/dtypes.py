"""Whether operators compute in the dtypes that the YAML names, and weights and their state are kept in those they should have.

A dtype changes memory and rounding and no other number. In fp32, in which ranks are executed beside a single device, a key of it
is not seen; graphs that are compiled in the dtypes of the run have it (:mod:`mindllm.prove.checks.graphs`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from mindllm.architecture.optimizer_state import CODES, is_state, updated_weights
from mindllm.compiled.conformance.communication import exchanged_gradients
from mindllm.compiled.conformance.expected import Dtypes, asked_dtypes, rows_of_rank
from mindllm.compiled.conformance.finding import Finding, Mistake, together
from mindllm.compiled.conformance.placement import messages
from mindllm.compiled.execute.state import ACCUMULATORS
from mindllm.compiled.graph.compiled_graph import Node
from mindllm.compiled.graph.operators import UPDATE, Operators, without_numbers
from mindllm.config import ModelConfig, RunConfig

FLOATING = ("float32", "bfloat16", "float16")
PRODUCTS = ("MatMul", "BatchMatMul", "GroupedMatmul", "MatMulExt", "BatchMatMulExt")
NORMS = ("RmsNorm", "LayerNorm", "LayerNormExt")
ROTATION = ("Mul", "Add", "Neg")
ACTIVATIONS = ("SiLU", "GeLU", "GeluExt", "ReLU", "Swiglu")
SCORES, ATTENTION = "Softmax", "FlashAttentionScore"
IN_FP32 = re.compile(r"(^|\.)(router|cross_entropy|pairs|prediction_losses)(\.|$)")
"""Cells all of whose numbers are in fp32, whatever is asked for: they choose experts, or are the loss."""
ROTATED, IN_ATTENTION = re.compile(r"(^|[._])rotary$"), re.compile(r"(^|\.)attention\.attention$")
OF_LAYER = re.compile(r"(^|\.)layers\.\d+$")
OF_CODES = "held"  # the cell that makes a matrix out of codes


def dtypes(config: RunConfig, ranks: Sequence[Operators]) -> Finding:
    """Compare the dtypes of operators, of messages between stages, and of weights and their state with the YAML's."""
    asked, states, model = asked_dtypes(config), _states(config), config.model.config
    mistakes, count = [], 0
    for rank in ranks:
        operators = (*_computed(rank, asked, states), *_kept(rank, asked, model), *_exchanged(rank, asked, model))
        for what, found, expected in operators:
            count += 1
            if found != expected:
                mistakes.append(Mistake(rank.graph.rank, f"{what} is in {found}, not in {expected}"))
    told = f"{count - len(mistakes)} of {count}" if mistakes else f"all {count} operators and tensors"
    return Finding("dtypes", asked.words, told, together(dict.fromkeys(mistakes)))


def _states(config: RunConfig) -> frozenset[tuple[int, ...]]:
    """Shapes of hidden states around the parts of layers, and of those of both models of pairs, which are sent together."""
    rows, hidden = rows_of_rank(config), config.model.config.hidden_size
    return frozenset((count, width) for count in (rows.between, rows.inside) for width in (hidden, 2 * hidden))


def _computed(rank: Operators, asked: Dtypes, states: Collection[tuple[int, ...]]) -> Iterator[tuple[str, str, str]]:
    """Yield operators with the dtype of their result and the YAML's. ``states``: shapes of hidden states."""
    for node in messages(rank):
        if node.shapes[0] in states:
            yield f"{node.op} of the pipeline", node.dtypes[0], asked.hidden
    for node in rank.nodes:
        found = node.dtypes[-1] if node.op == ATTENTION else node.dtypes[0] if node.dtypes else ""
        if found not in FLOATING or rank.phase(node) == UPDATE:
            continue
        place = rank.place(node)
        if (expected := _wanted(node, place, asked, states)) is not None:
            yield f"{node.op} of {without_numbers(place)}", found, expected


def _wanted(node: Node, place: str, asked: Dtypes, states: Collection[tuple[int, ...]]) -> str | None:
    """Return the YAML's dtype of an operator's result; None if it has none."""
    if IN_FP32.search(place) and node.op in (*PRODUCTS, SCORES, "Exp", "Log", "Sigmoid", "ReduceSum", "ReduceMax"):
        return asked.exact
    if node.op in NORMS:
        return asked.norms
    if ROTATED.search(place):
        return asked.rotation if node.op in ROTATION else None
    if node.op == SCORES and IN_ATTENTION.search(place):
        return asked.softmax
    if node.op == "Add" and OF_LAYER.search(place) and node.shapes[0] in states:
        return asked.hidden
    is_computed = node.op in (*PRODUCTS, *ACTIVATIONS, ATTENTION) and OF_CODES not in place.split(".")
    return asked.products if is_computed else None


def _exchanged(rank: Operators, asked: Dtypes, model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield gradients that replicas exchange, where parameters are in half precision: name, dtype, and the one asked for.

    Sums of several micro-batches are exchanged in the type of the accumulators.
    """
    if not model.has_half_parameters:
        return
    accumulated = any(name.startswith(ACCUMULATORS) for name in rank.graph.parameters)
    for weight, node in exchanged_gradients(rank).items():
        wide = accumulated and asked.sums == asked.exact
        yield (
            f"{node.op} of the gradient of {weight}",
            node.dtypes[0],
            asked.exact if wide else model.parameter_type(weight),
        )


def _kept(rank: Operators, asked: Dtypes, model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield trained weights, their accumulators and state, and frozen weights: name, dtype, and the one asked for."""
    parameters = rank.graph.parameters
    trained = frozenset(updated_weights(parameters))
    for name, parameter in parameters.items():
        if name.startswith(tuple(f"{kind}." for kind in CODES)):
            yield name, parameter.dtype, "uint8"
        elif is_state(name):
            yield name, parameter.dtype, asked.exact
        elif name.startswith(ACCUMULATORS):
            weight = name.removeprefix(ACCUMULATORS)
            yield name, parameter.dtype, asked.exact if asked.sums == asked.exact else model.parameter_type(weight)
        elif name in trained:
            yield name, parameter.dtype, model.parameter_type(name)
        elif name.endswith("weight") and parameter.dtype in FLOATING:
            yield name, parameter.dtype, asked.frozen
