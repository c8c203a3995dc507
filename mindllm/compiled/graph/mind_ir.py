"""Reads a compiled graph from MindIR, MindSpore's exchange format: protobuf, ``mind_ir.proto`` of the installed wheel.

The wheel's protobuf module is loaded without MindSpore itself, so a kept graph is read in a moment.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from mindllm.compiled.graph.compiled_graph import (
    CALL,
    CONSTANT,
    ClosureType,
    CompiledGraph,
    Function,
    Input,
    Node,
    OtherType,
    Parameter,
    TensorType,
    TupleType,
    ValueType,
    groups_of,
    local_name,
)
from mindllm.compiled.graph.sources import Sources
from mindllm.compiled.rank.pool import Pool
from mindllm.errors import UserError, shortened
from mindllm.parallel.layout import GROUP_RANKS
from mindllm.parallel.parameter_layout import ParameterLayout

REFERENCE = "REF::"
PROTOBUF = "mindspore.train.mind_ir_pb2"
CLOSURES = ("PARTIALCLOSURE", "FUNCGRAPHCLOSURE", "UNIONFUNCCLOSURE", "PRIMITIVECLOSURE")
SEQUENCES = ("TUPLE", "LIST")
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "str", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
    17: "float64", 18: "int4",
}  # fmt: skip


def parse_mind_ir(
    data: bytes,
    rank: int,
    layouts: Mapping[str, ParameterLayout] | None = None,
    sources: Sources | None = None,
    initial: Mapping[str, np.ndarray] | None = None,
    pool: Pool | None = None,
) -> CompiledGraph:
    """Read the graph of ``rank``. Layouts and initial values of parameters and source lines are not part of MindIR.

    Graphs that are read with one ``pool`` share what they have in common, and do not keep the MindIR.

    Raises:
        UserError: it is not MindIR, or only a part of it, or damaged.
    """
    try:
        return _graph(data, rank, layouts or {}, sources or {}, initial or {}, pool)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(
            f"this is damaged MindIR, or of another version ({type(error).__name__}: {shortened(str(error))})"
        ) from error


def _graph(
    data: bytes,
    rank: int,
    layouts: Mapping[str, ParameterLayout],
    sources: Sources,
    initial: Mapping[str, np.ndarray],
    pool: Pool | None,
) -> CompiledGraph:
    model = _parse(data)
    primitives = {primitive.name: primitive for primitive in model.primitives}
    graphs = [model.graph, *model.functions]
    reader = _NodeReader(primitives, pool or Pool())
    functions = tuple(_function(graph, reader) for graph in graphs)
    groups = groups_of(functions)
    parameters = {}
    for tensor in model.graph.parameter:
        name = local_name(tensor.name)
        layout = layouts.get(name)
        if layout is not None and layout.optimizer_group:
            layout = replace(layout, optimizer_ranks=groups.get(layout.optimizer_group, ()))
        begins = initial.get(name)
        begins = begins if begins is None or pool is None else pool.array(begins)
        parameters[name] = Parameter(name, tensor.name, tuple(tensor.dims), _dtype(tensor), layout, begins)
    return CompiledGraph(rank, functions, parameters, groups, sources, data if pool is None else b"")


def parameter_names(data: bytes) -> list[str]:
    """Read the names of a graph's parameters without its nodes."""
    return [local_name(tensor.name) for tensor in _parse(data).graph.parameter]


def _parse(data: bytes) -> Any:
    from google.protobuf.message import DecodeError

    model = _model_proto()()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise UserError(f"this is not MindIR, or only a part of it ({error})") from None
    if not model.graph.node and not model.graph.output:
        raise UserError("this is not MindIR: it holds no graph")
    return model


@cache
def _model_proto() -> Any:
    """The class of a whole MindIR.

    Importing MindSpore makes protobuf parse in Python (``_check_version.py`` sets ``PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION``),
    which takes 0.35 s for 2 MB; its parser in C, upb, takes a millisecond, and is used where this protobuf has it.
    """
    module = _protobuf()
    try:
        from google._upb._message import DescriptorPool, MessageMeta
        from google.protobuf.message import Message

        file = DescriptorPool().AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        described = {"DESCRIPTOR": file.message_types_by_name["ModelProto"], "__module__": __name__}
        return MessageMeta("ModelProto", (Message,), described)
    except (ImportError, AttributeError, TypeError, SystemError):  # of another version: slower, and the same
        return module.ModelProto


@cache
def _protobuf() -> ModuleType:
    """``mindspore.train.mind_ir_pb2``, without importing the packages around it."""
    if PROTOBUF in sys.modules:
        return sys.modules[PROTOBUF]
    package = importlib.util.find_spec("mindspore")
    if package is None or package.origin is None:
        raise UserError("reading MindIR needs the mindspore package: pip install mindspore")
    path = Path(package.origin).parent / "train" / "mind_ir_pb2.py"
    specification = importlib.util.spec_from_file_location("mindllm_mind_ir_pb2", path)
    if specification is None or specification.loader is None:
        raise UserError(f"the installed mindspore has no {path}")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _function(graph: Any, reader: _NodeReader) -> Function:
    return Function(
        name=graph.name,
        nodes=tuple(reader.node(node) for node in graph.node),
        inputs=tuple(Input(value.name, _value_type(value)) for value in graph.input),
        output=graph.output[0].name if graph.output else "",
        attributes=_attributes(graph.attribute),
    )


def _with_ranks(operators: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return attributes of operators with the ranks of groups that the model created.

    The compiler gives these groups all ranks of the stage, and gradients have the name of the group only.
    """
    groups = {one["group"]: one[GROUP_RANKS] for one in operators.values() if GROUP_RANKS in one and "group" in one}
    return {
        name: {**one, "group_rank_ids": groups[one["group"]]} if one.get("group") in groups else one
        for name, one in operators.items()
    }


class _NodeReader:
    """Reads nodes; operators with their attributes stand apart from them and are read once."""

    def __init__(self, primitives: Mapping[str, Any], pool: Pool) -> None:
        self.pool, self.same = pool, pool.same
        self.operators = {name: primitive.op_type for name, primitive in primitives.items()}
        read = _with_ranks({name: _attributes(one.attribute) for name, one in primitives.items()})
        self.attributes = {name: pool.attributes(one) for name, one in read.items()}
        self.instances = {name: primitive.instance_name for name, primitive in primitives.items()}

    def node(self, node: Any) -> Node:
        reference = node.op_type.removeprefix(REFERENCE)
        known = reference in self.operators
        called = not known and node.op_type.startswith(REFERENCE)
        op = self.operators[reference] if known else CALL if called else node.op_type
        values = {attribute.name: attribute for attribute in node.attribute}
        constant = op == CONSTANT and "value" in values
        return Node(
            op=self.same(op),
            name=self.same(node.output[0]),
            inputs=self.same(tuple(map(self.same, node.input))),
            type=self.same(_type(values["value" if constant else "shape"]) if values else OtherType("NONE")),
            scope=self.same(node.domain),
            attributes=self.attributes.get(reference, {}),
            primal=self.pool.plain(_attributes([*node.primal_attr, *node.node_attr])),
            callee=reference if called else "",
            value=_value(values["value"]) if constant else None,
            instance=self.same(self.instances.get(reference, "")),
        )


def _value_type(value: Any) -> ValueType:
    """Type of an input or output of a function: one tensor, or what its attribute says."""
    if value.tensor:
        return _tensor_type(value.tensor[0])
    return _type(value.attr_info)


def _type(attribute: Any) -> ValueType:
    kind = _kind(attribute)
    if kind in SEQUENCES:
        return TupleType(tuple(_type(value) for value in attribute.values))
    if kind == "TENSORS" and len(attribute.tensors) == 1:
        return _tensor_type(attribute.tensors[0])
    if kind in CLOSURES:
        return ClosureType(tuple(_closure_names(attribute)))
    return OtherType(kind)


def _closure_names(attribute: Any) -> Iterator[str]:
    if attribute.s:
        yield attribute.s.decode()
    for value in attribute.values:
        yield from _closure_names(value)


def _tensor_type(tensor: Any) -> TensorType:
    return TensorType(tuple(tensor.dims), _dtype(tensor), tensor.ref_key)


def _dtype(tensor: Any) -> str:
    return DTYPES.get(tensor.data_type, "undefined")


def _attributes(attributes: Iterable[Any]) -> dict[str, Any]:
    return {attribute.name: _value(attribute) for attribute in attributes}


def _value(attribute: Any) -> Any:
    """Convert a constant or an attribute to a Python value. A dtype becomes its name."""
    kind = _kind(attribute)
    if kind in SEQUENCES:
        return tuple(_value(value) for value in attribute.values)
    if kind == "DICT":
        return {entry.name: _value(entry.values[0]) for entry in attribute.values}
    if kind == "TENSORS":
        values = [
            _array(tensor) if tensor.raw_data or 0 in tensor.dims else _dtype(tensor) for tensor in attribute.tensors
        ]
        return values[0] if len(values) == 1 else tuple(values)
    if kind == "STRING":
        return (attribute.s or b"".join(attribute.strings)).decode()
    if kind == "BOOL":
        return bool(attribute.ints[0] if attribute.ints else attribute.i)
    if kind in ("FLOAT", "DOUBLE"):
        single, double = attribute.floats, attribute.doubles
        return (single[0] if single else attribute.f) if kind == "FLOAT" else (double[0] if double else attribute.d)
    if kind == "NONE":
        return None
    if kind in ("UMONAD", "IOMONAD", "TYPE_NULL"):
        return OtherType(kind)
    return attribute.ints[0] if attribute.ints else attribute.i


def _array(tensor: Any) -> np.ndarray:
    """Return a constant tensor. It shares the bytes of the file and is read-only."""
    dtype = np.dtype(ml_dtypes.bfloat16) if tensor.data_type == 16 else np.dtype(DTYPES[tensor.data_type])
    return np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims))


def _kind(attribute: Any) -> str:
    return attribute.AttributeType.Name(attribute.type)
