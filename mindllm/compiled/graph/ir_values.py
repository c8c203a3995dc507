"""Values and types as MindSpore's text ``.ir`` writes them: ``I64(1)``, ``((2, 1), (1))``, ``<Tensor[Float16], (64, 32)>``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mindllm.compiled.graph.compiled_graph import ClosureType, OtherType, TensorType, TupleType, ValueType

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
    """Where the bracket opened at ``text[start]`` closes; brackets inside quotes do not count.

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
    """The parts between commas that stand outside of brackets and quotes."""
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
    """A literal as a Python value; a monad as its type; anything else (a dtype, a large tensor, a name) stays text."""
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
    """The type of ``<Tensor[Float16], (64, 32)>``, ``<Tuple[Tensor[Float32]*2], TupleShape((32, 64), (32, 1))>`` and others."""
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
