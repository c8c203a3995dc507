"""What public functions take, held against the annotations of their signatures before any work begins.

A wrong name, a wrong type and a number out of its range are mistakes of the user (:class:`mindllm.errors.UserError`), with the
function, the argument, its value and what to write: one problem for each. Imports nothing that takes time.
"""

from __future__ import annotations

import builtins
import errno
import functools
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from mindllm.errors import ALIKE, Origin, Problem, UserError, nearest, shortened, text_of
from mindllm.units import DEVICE_SIZE

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Advice:
    """What to write where a value is none that an argument takes."""

    text: str


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``least`` on, or above it, as ``words`` say."""

    words: str
    least: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies in it."""
        return math.isfinite(value) and (value > self.least if self.above else value >= self.least)


@dataclass(frozen=True)
class Form:
    """Texts of a form, as ``words`` say."""

    words: str
    pattern: re.Pattern[str]

    def holds(self, value: str) -> bool:
        """Whether a text has it."""
        return self.pattern.fullmatch(value) is not None


Count = Annotated[int, Range("from 1 on", 1)]
Index = Annotated[int, Range("from 0 on", 0)]
Seconds = Annotated[float, Range("above 0", 0, above=True)]
Patience = Annotated[float, Range("from 0 on", 0)]
Memory = Annotated[str, Form("that is a size of a memory", DEVICE_SIZE), Advice("write it as '58GB' or '58000MB'")]
Overrides = Annotated[Sequence[str] | Mapping[str, Any], Advice("write a dictionary of dotted keys, as {'seed': 1}")]
Prompt = str | Sequence[Mapping[str, str]]

NAMES: dict[Any, tuple[str, str]] = {  # of one such value, and of several
    str: ("a text", "texts"),
    bool: ("True or False", "True or False"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    Path: ("a path", "paths"),
    os.PathLike: ("a path", "paths"),
    Mapping: ("a dictionary", "dictionaries"),
    types.NoneType: ("None", "None"),
}


class _Wrong(Exception):
    """A value is none that an annotation allows."""


def checked(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Hold the arguments of each call of a public function against its signature.

    Integers of numpy become Python's, and what is iterable becomes a tuple where a sequence is wanted. A call with mistakes
    raises a UserError that names all of them. So does a text of thousands of characters in the place of a path.
    """

    @functools.wraps(function)
    def call(*values: Parameters.args, **options: Parameters.kwargs) -> Returned:
        try:
            return function(**arguments_of(function, values, options))  # type: ignore[call-arg]
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise UserError(
                f"mindllm.{function.__name__}: {shortened(str(error.filename))}: {error.strerror}"
            ) from None

    return call


def arguments_of(function: Callable[..., Any], values: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, as the function takes them.

    Raises:
        UserError: some are wrong.
    """
    known = _parameters(function)
    names = [name for name, one in known.items() if one.kind is not one.VAR_KEYWORD]
    nameless = [name for name in names if known[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    given = {**dict(zip(nameless, values, strict=False)), **options}
    problems = [*_misplaced(nameless, names, values, options)]
    for name in [name for name in given if name not in names]:
        if len(names) == len(known) or get_close_matches(name, names, cutoff=ALIKE):  # else it is a key of a section
            message = f"unknown argument (value {shortened(text_of(given[name], repr))}){nearest(name, names)}"
            problems.append((name, message, given[name]))
    for name in names:
        optional = known[name].default is not inspect.Parameter.empty
        if name not in given and not optional:
            problems.append((name, f"this argument is required{_meaning(function, name)}", None))
        elif name in given:
            value, kind = given[name], _kinds(function)[name]
            try:
                given[name] = _fitting(value, kind)
            except _Wrong:
                can_go = value is None and optional
                advice = "; leave it out" if can_go else _advice(value, kind)
                advice = advice or (_meaning(function, name) if kind is not bool else "")
                problems.append(
                    (name, f"must be {_words(kind)} (value {shortened(text_of(value, repr))}){advice}", value)
                )
    if problems:
        origin = Origin(option=f"mindllm.{function.__name__}")
        raise UserError.of(*(Problem(origin, (name,), message, value) for name, message, value in problems))
    return given


def _misplaced(
    nameless: Sequence[str], names: Sequence[str], values: Sequence[Any], options: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """Yield arguments that are given without their name, or twice."""
    named = ", ".join(name for name in names if name not in nameless)
    for number, value in enumerate(values[len(nameless) :], len(nameless) + 1):
        yield (
            f"argument {number}",
            f"has no name (value {shortened(text_of(value, repr))}); it goes by one of the names {named}",
            value,
        )
    for name in nameless[: len(values)]:
        if name in options:
            yield (
                name,
                f"is given twice (value {shortened(text_of(options[name], repr))}); leave one out",
                options[name],
            )


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


class _Names(dict[str, Any]):
    """Names in annotations. What is imported for type checkers alone becomes a class that is known by its name."""

    def __missing__(self, name: str) -> Any:
        return type(name, (), {"__module__": __name__})


@functools.cache
def _kinds(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations of a function as types."""
    known = _Names(vars(builtins) | globals() | function.__globals__)
    return get_type_hints(function, localns=known, include_extras=True)


def _fitting(value: Any, kind: Any) -> Any:
    """The value as a function takes it.

    Raises:
        _Wrong: it is of another type, out of range, or without the form.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        taken = _fitting(value, inner[0])
        if not all(note.holds(taken) for note in inner[1:] if isinstance(note, Range | Form)):
            raise _Wrong
        return taken
    if origin in (Union, types.UnionType):
        return _fitting_one(value, inner)
    if origin is Sequence:
        return _sequence(value, inner[0])
    if not _is(value, kind) or (origin is Mapping and not all(isinstance(key, str) for key in value)):
        raise _Wrong
    return int(value) if kind is int else value


def _fitting_one(value: Any, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        try:
            return _fitting(value, kind)
        except _Wrong:
            continue
    raise _Wrong


def _sequence(value: Any, inner: Any) -> Any:
    """A list or tuple of the right things as it is, what else is iterable as a tuple of them."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise _Wrong
    given = [*value]
    items = [_fitting(item, inner) for item in given]
    as_given = isinstance(value, list | tuple) and all(one is other for one, other in zip(items, given, strict=True))
    return value if as_given else tuple(items)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a plain type; True and False are no numbers."""
    kind = get_origin(kind) or kind
    if kind is Any:
        return True
    if kind is bool:
        return type(value).__name__ in ("bool", "bool_")  # numpy's, too
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, os.PathLike)
    if getattr(kind, "_is_protocol", False) and kind is not os.PathLike:
        return callable(value)
    if kind.__module__ == __name__:  # see _Names
        return any(base.__name__ == kind.__name__ for base in type(value).__mro__)
    return isinstance(value, kind)


def _words(kind: Any, several: bool = False) -> str:
    """What an annotation allows, in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        notes = [note.words for note in inner[1:] if isinstance(note, Range | Form)]
        return " ".join([_words(inner[0], several), *notes])
    if origin in (Union, types.UnionType):
        *others, last = dict.fromkeys(_words(one, several) for one in inner)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is Sequence:
        return f"{'lists' if several else 'a list'} of {_words(inner[0], several=True)}"
    if getattr(kind, "_is_protocol", False):
        return "functions" if several else "a function"
    plain = origin or kind
    return NAMES.get(plain, (f"a {plain.__name__}", plain.__name__))[several]


def _advice(value: Any, kind: Any) -> str:
    """What to write instead: what the annotation says, else the value in a form that fits; empty where there is none."""
    if note := next(_notes(kind), None):
        return f"; {note.text}"
    for form in _forms(value):
        try:
            return f"; write {_fitting(form, kind)!r}"
        except _Wrong:
            continue
    return ""


def _notes(kind: Any) -> Iterator[Advice]:
    """Yield what annotations say is to be written."""
    if get_origin(kind) is Annotated:
        yield from (note for note in get_args(kind)[1:] if isinstance(note, Advice))
    elif get_origin(kind) in (Union, types.UnionType):
        for one in get_args(kind):
            yield from _notes(one)


def _forms(value: Any) -> Iterator[Any]:
    """Yield what may have been meant by a value: a list of it, the number that a text holds, an integer, True or False."""
    yield [value]
    if isinstance(value, str):
        for kind in (int, float):
            try:
                yield kind(value)
            except ValueError:
                continue
    elif isinstance(value, Real) and value in (0, 1):
        yield bool(value)
    elif isinstance(value, float) and value.is_integer():
        yield int(value)


def _meaning(function: Callable[..., Any], name: str) -> str:
    """What the docstring says an argument is; empty where there is none, as under ``python -OO``."""
    found = re.search(rf"^ +{name}: (.*(?:\n {{8}} *\S.*)*)", inspect.getdoc(function) or "", re.MULTILINE)
    text = " ".join(found.group(1).split()) if found else ""
    return f"; its meaning: {text.removesuffix('.').replace('``', chr(39))}" if text else ""
