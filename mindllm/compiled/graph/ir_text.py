"""MindSpore's text ``.ir`` as a :class:`CompiledGraph`: what ``save_graphs`` writes on anybody's machine.

A file is a header, then one block per graph::

    subgraph @forward(%para1_x, %para2_weight) {
      %0(CNode_5) = PrimFunc_MatMul(%para1_x, %para2_weight, Bool(0), Bool(1)) {instance name: matmul} cnode_attrs: {...}
          : (<Tensor[Float16], (64, 64)>, ...) -> (<Tensor[Float16], (64, 32)>)
          # Fullname with scope: (Default/network-Net/MatMul-op0)
          # In file /home/user/net.py:12, 8~30/        return self.matmul(x, self.weight)/
      Return(%0)
    }

The one named ``…_validate_….ir`` holds the graph after all passes of the front end: what MindIR holds, and source lines besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
)
from mindllm.compiled.graph.sources import read_sources
from mindllm.errors import UserError
from mindllm.outside import LARGEST_GRAPH, read_text

QUOTED = r'"(?:[^"\\]|\\.)*"'
BRACKET = re.compile(QUOTED + r"|[()\[\]{}]")
MARK = re.compile(QUOTED + r"|->|[()\[\]{}<>,]")
SCALAR = re.compile(r"(Bool|[IU]\d+|BF16|F\d+)\((.*)\)", re.DOTALL)
DTYPE = re.compile(r"(BFloat|Float|Int|UInt|Complex)(\d+)|Bool")
REPEATED = re.compile(r"(.*)\*(\d+)", re.DOTALL)
REFERENCE_KEY = "ref_key="
MONADS = ("UMonad", "IOMonad")
NO_TYPE = OtherType("NONE")


def closing(text: str, start: int) -> int:
    """Return the position where the bracket at ``text[start]`` closes. Brackets inside quotes do not count.

    Raises:
        ValueError: it does not close.
    """
    depth = 0
    for found in BRACKET.finditer(text, start):
        mark = found.group()
        depth += (mark in ("(", "[", "{")) - (mark in (")", "]", "}"))
        if depth == 0:
            return found.start()
    raise ValueError(f"'{text[start]}' is not closed")


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, begin = [], 0, 0
    for found in MARK.finditer(text):
        mark = found.group()
        depth += (mark in ("(", "[", "{", "<")) - (mark in (")", "]", "}", ">"))
        if mark == "," and depth == 0:
            parts.append(text[begin : found.start()].strip())
            begin = found.end()
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def parse_value(text: str) -> Any:
    """Parse a literal to a Python value, and a monad to its type. Dtypes, large tensors and names stay text."""
    if text.startswith('"') and text.endswith('"') and len(text) > 1:
        return text[1:-1]
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        return tuple(parse_value(part) for part in split(text[1:-1]))
    if scalar := SCALAR.fullmatch(text):
        return _number(*scalar.groups())
    if text.startswith(MONADS):
        return OtherType(text.partition("[")[0].upper())
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return None if text == "None" else text


def _number(kind: str, text: str) -> Any:
    try:
        if kind == "Bool":
            return text in ("1", "true")
        return float(text) if "F" in kind else int(text)
    except ValueError:
        return text


def parse_entries(text: str) -> dict[str, Any]:
    """``name: value`` pairs between commas."""
    pairs = (part.partition(":") for part in split(text))
    return {name.strip(): parse_value(value.strip()) for name, _, value in pairs}


def parse_type(text: str) -> ValueType:
    """Parse a type, as ``<Tensor[Float16], (64, 32)>`` or ``<Tuple[Tensor[Float32]*2], TupleShape((32, 64), (32, 1))>``."""
    kind, *rest = split(text.strip().removeprefix("<").removesuffix(">"))
    keys = [part.removeprefix(REFERENCE_KEY) for part in rest if part.startswith(REFERENCE_KEY)]
    return _type(kind, rest[0] if rest else "", keys[0] if keys else "")


def _type(kind: str, shape: str, parameter: str = "") -> ValueType:
    name, _, inner = kind.partition("[")
    inner = inner.removesuffix("]")
    if name == "Tensor":
        return TensorType(_sizes(shape), dtype(inner), parameter)
    if name in ("Ref", "Parameter"):
        return _type(inner, shape, parameter)
    if name in ("Tuple", "List"):
        kinds = list(_repeated(split(inner)))
        shapes = split(shape.partition("(")[2].removesuffix(")"))
        if len(shapes) != len(kinds):  # a sequence of unknown length has no shapes
            shapes = [""] * len(kinds)
        return TupleType(tuple(map(_type, kinds, shapes)))
    if name == "Func":
        return ClosureType(())
    return OtherType(name.upper()) if name != "null" else NO_TYPE


def _repeated(kinds: Iterable[str]) -> Iterable[str]:
    """``Tensor[Float32]*2`` means two of them."""
    for kind in kinds:
        found = REPEATED.fullmatch(kind)
        yield from [found.group(1)] * int(found.group(2)) if found else [kind]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in re.findall(r"-?\d+", text)) if text.startswith("(") else ()


def dtype(name: str) -> str:
    """Numpy's name of a dtype: ``Float16`` is ``float16``."""
    return name.lower() if DTYPE.fullmatch(name) else "undefined"


ENTRY = re.compile(r"#\s*IR entry\s*:\s*@(\S+)")
PARAMETER = re.compile(r"^%para(\d+)_(\S*?)\s*: (<.*?>)(?=\s*:|\s*$)", re.MULTILINE)
SUBGRAPH = re.compile(r"subgraph @(\S+?)(?: parent: \[.*\])?\((.*)\) \{$")
INPUT_TYPES = re.compile(r"# Parameters: \d+, (\(.*\))$")
INPUT = re.compile(r"%?para(\d+)_(.*)")
STATEMENT = re.compile(r"\s+(%\d+)\((.*?)\) = (.*)", re.DOTALL)
RETURN = re.compile(r"\s+Return\(")
TYPES = re.compile(r"\s+: (\(.*\) -> \(.*\))$")
SCOPE = re.compile(r"\s+# (?:Fullname with scope|Scope): \((.*)\)$")
MARKS = re.compile(r"\s*(?:(\w+): )?\{")
FREE = re.compile(r"\$\(@(.+?):(.+?)\)")
WRAPPINGS = ("PrimFunc_", "DoSignaturePrimitive::", "S-Prim-", "Prim_")
INSTANCE_NAME = "instance name: "
SHOWN = 80  # characters of a damaged line


def read_ir_text(path: Path, rank: int = 0) -> CompiledGraph:
    """Read a text ``.ir``. It does not say which ``rank`` it is of.

    Raises:
        UserError: it cannot be read, is something else, or damaged; says where.
    """
    try:
        return parse_ir_text(read_text(path, LARGEST_GRAPH), rank)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_ir_text(text: str, rank: int = 0) -> CompiledGraph:
    """Read the content of a ``.ir``.

    Raises:
        UserError: it is something else, or damaged; says in which line.
    """
    entry = ENTRY.search(text)
    if not entry:
        raise UserError("no text .ir of MindSpore: it has no line '# IR entry: @…'")
    lines = text.splitlines()
    blocks = sorted(_blocks(lines), key=lambda block: block.name != entry.group(1))
    if not blocks or blocks[0].name != entry.group(1):
        raise UserError(f"damaged: the graph it begins with, @{entry.group(1)}, is not in it")
    step = blocks[0]
    parameters: dict[str, Parameter] = {}
    for number, name, written in PARAMETER.findall(text[: text.index("\nsubgraph @")]):
        kind, node = parse_type(written), f"{step.name}:{name or 'para' + number}"
        if isinstance(kind, TensorType) and kind.parameter:
            parameters[name] = Parameter(name, node, kind.shape, kind.dtype)
            step.bound[number] = node
        else:
            step.inputs[number] = Input(node, kind)
    reader = _NodeReader(blocks)
    functions = tuple(map(reader.function, blocks))
    sources = {scope: calls for scope, calls in read_sources(lines).items() if scope}
    return CompiledGraph(rank, functions, parameters, groups_of(functions), sources)


@dataclass
class _Record:
    """The lines of one node."""

    line: int
    text: str
    types: str = ""
    scope: str = ""

    @property
    def head(self) -> tuple[str, str, str]:
        """Number, name in the source, and what is behind the equals sign."""
        found = STATEMENT.fullmatch(self.text)
        assert found
        return found.group(1), found.group(2), found.group(3)


@dataclass
class _Block:
    """The lines of one graph; ``inputs`` by number, and the names of parameters that only the top graph has."""

    name: str
    inputs: dict[str, Input] = field(default_factory=dict)
    bound: dict[str, str] = field(default_factory=dict)
    records: list[_Record] = field(default_factory=list)
    output: str = ""


def _blocks(lines: list[str]) -> Iterator[_Block]:
    block: _Block | None = None
    types = ""
    for number, line in enumerate(lines, start=1):
        if block is None:
            if found := INPUT_TYPES.match(line):
                types = found.group(1)
            elif line.startswith("subgraph @"):
                block, types = _opened(number, line, types), ""
        elif line == "}":
            yield block
            block = None
        elif STATEMENT.match(line):
            block.records.append(_Record(number, line))
        elif found := RETURN.match(line):
            try:
                block.output = line[found.end() : closing(line, found.end() - 1)]
            except ValueError as error:
                raise _damaged(number, line, error) from None
        elif block.records and not block.output:
            _continue(block.records[-1], line)
    if block is not None:
        raise UserError(f"ends inside the graph @{block.name}: only a part of the file is here; copy or dump it again")


def _opened(number: int, line: str, types: str) -> _Block:
    found = SUBGRAPH.match(line)
    if not found:
        raise _damaged(number, line, "not the beginning of a graph")
    block = _Block(found.group(1))
    kinds = list(map(parse_type, split(types[1:-1])))
    for text, kind in zip(split(found.group(2)), kinds, strict=False):
        if name := INPUT.match(text):
            block.inputs[name.group(1)] = Input(f"{block.name}:{name.group(2)}", kind)
    return block


def _damaged(number: int, line: str, why: object) -> UserError:
    return UserError(f"line {number} is damaged ({why}): {line.strip()[:SHOWN]}")


def _continue(record: _Record, line: str) -> None:
    """Parse a line after the first one of a node."""
    if found := TYPES.match(line):
        record.types = found.group(1)
    elif found := SCOPE.match(line):
        record.scope = found.group(1)
    elif not record.types:
        record.text += "\n" + line  # a constant that is printed over several lines


class _NodeReader:
    """Makes nodes of records; knows the names that all graphs of a file use for each other's nodes."""

    def __init__(self, blocks: list[_Block]) -> None:
        self.names: dict[tuple[str, str], str] = {}
        self.inputs: dict[str, str] = {}
        self.constants: dict[tuple[str, ValueType], Node] = {}
        for block in blocks:
            self.inputs.update({**block.bound, **{number: given.name for number, given in block.inputs.items()}})
            for record in block.records:
                number, debug_name, _ = record.head
                name = f"{block.name}:{debug_name}:{number.removeprefix('%')}"
                self.names[block.name, number] = self.names[block.name, debug_name] = name

    def function(self, block: _Block) -> Function:
        """Parse a graph, with the constants that no earlier graph uses."""
        nodes: list[Node] = []
        for record in block.records:
            before = len(self.constants)
            try:
                node = self._node(block, record)
            except (ValueError, IndexError) as error:
                raise _damaged(record.line, record.text, error) from None
            nodes += [*list(self.constants.values())[before:], node]
        before = len(self.constants)
        try:
            output = self._input(block.name, block.output, NO_TYPE)
        except ValueError as error:
            raise UserError(f"damaged: what @{block.name} returns {error}") from None
        nodes += list(self.constants.values())[before:]
        return Function(block.name, tuple(nodes), tuple(block.inputs.values()), output)

    def _node(self, block: _Block, record: _Record) -> Node:
        number, _, text = record.head
        target, arguments, rest = _application(text)
        types, kind = _types(record.types)
        inputs = tuple(
            self._input(block.name, argument, types[index] if index < len(types) else NO_TYPE)
            for index, argument in enumerate(split(arguments))
        )
        instance, marks = _marks(rest)
        attributes = {**marks.get("", {}), **marks.get("primitive_attrs", {})}
        op, callee = self._called(block.name, target)
        return Node(
            op=op,
            name=self.names[block.name, number],
            inputs=inputs,
            type=kind,
            scope=record.scope,
            attributes=attributes,
            primal={**marks.get("cnode_primal_attrs", {}), **marks.get("cnode_attrs", {})},
            callee=callee,
            instance=instance,
        )

    def _called(self, graph: str, target: str) -> tuple[str, str]:
        """Operator and callee."""
        if target.startswith("call @"):
            return CALL, target.removeprefix("call @")
        if target.startswith(("%", "$")):
            return CALL, self._reference(graph, target)
        for prefix in WRAPPINGS:
            target = target.removeprefix(prefix)
        return target, ""

    def _input(self, graph: str, text: str, kind: ValueType) -> str:
        if text.startswith("@"):
            return text.removeprefix("@")
        if text.startswith(("%", "$")):
            return self._reference(graph, text)
        name = f"constant:{len(self.constants)}"
        constant = Node(CONSTANT, name, (), kind, "", {}, value=parse_value(text))
        return self.constants.setdefault((text, kind), constant).name

    def _reference(self, graph: str, text: str) -> str:
        """Return the node or input that ``%7``, ``%para1_x`` or ``$(@graph:name)`` names. A callee may follow."""
        if free := FREE.match(text):
            graph, text = free.groups()
        text = text.partition("[")[0]
        found = INPUT.match(text)
        name = self.inputs.get(found.group(1)) if found else self.names.get((graph, text))
        if name is None:
            raise ValueError(f"{text} is not defined")
        return name


def _application(text: str) -> tuple[str, str, str]:
    """Operator, arguments and what follows them, of ``MatMul(%1, %2) {instance name: matmul}``."""
    begin = closing(text, text.index("[")) + 1 if re.match(r"[%$\w]+\[", text) else 0
    if text.startswith("$"):
        begin = max(begin, closing(text, text.index("(")) + 1)
    begin = text.index("(", begin)
    end = closing(text, begin)
    return text[:begin], text[begin + 1 : end], text[end + 1 :]


def _types(text: str) -> tuple[list[ValueType], ValueType]:
    """Parse the types of the inputs and of the output."""
    if not text:
        return [], NO_TYPE
    end = closing(text, 0)
    outputs = text[text.index("(", end) + 1 : -1]
    return list(map(parse_type, split(text[1:end]))), parse_type(outputs)


def _marks(text: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Name of the operator's instance, and attributes by the word before their braces (strategies stand without one)."""
    instance, marks, begin = "", {}, 0
    while found := MARKS.match(text, begin):
        end = closing(text, found.end() - 1)
        content = text[found.end() : end]
        if content.startswith(INSTANCE_NAME):
            instance = content.removeprefix(INSTANCE_NAME)
        else:
            marks[found.group(1) or ""] = parse_entries(content)
        begin = end + 1
    return instance, marks
