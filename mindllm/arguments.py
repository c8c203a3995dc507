"""Validation of the arguments of public functions: pydantic and their signatures, before any work begins.

Unknown names, invalid types and numbers out of range raise one :class:`mindllm.errors.UserError` with a problem for each
argument: the function, the argument, its value and the fix. Pydantic is imported at the first call.
"""

from __future__ import annotations

import errno
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Gt, Predicate

from mindllm.errors import ALIKE, Origin, Problem, UserError, nearest, shortened, text_of
from mindllm.units import DEVICE_SIZE

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Advice:
    """The fix that an error names for an invalid value of the annotated argument."""

    text: str


def is_memory_size(text: str) -> bool:
    """Return True for a size of device memory such as ``58GB``."""
    return DEVICE_SIZE.fullmatch(text) is not None


Count = Annotated[int, Ge(1)]
Index = Annotated[int, Ge(0)]
Seconds = Annotated[float, Gt(0)]
Patience = Annotated[float, Ge(0)]
Memory = Annotated[str, Predicate(is_memory_size), Advice("write a size such as '58GB' or '58000MB'")]
Overrides = Annotated[
    Sequence[str] | Mapping[str, Any], Advice("write a dictionary of dotted keys, such as {'seed': 1}")
]
Prompt = str | Sequence[Mapping[str, str]]

MISSING = "this argument is required"
EXPECTED = {  # by the type of pydantic's error
    "string_type": "text",
    "string_unicode": "text that is valid UTF-8",
    "bool_type": "True or False",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "path_type": "a path",
    "mapping_type": "a dictionary",
    "dict_type": "a dictionary",
    "list_type": "a list",
    "sequence_str": "a list",
    "callable_type": "a function",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "predicate_failed": "a size with a unit",
}
CLASSES = {"Sequence": "a list", "Path": "a path", "PathLike": "a path", "Mapping": "a dictionary"}


def checked(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Validate the arguments of each call of a public function against its signature.

    Integers of numpy become integers of Python, and other iterables become tuples where a sequence is expected. All mistakes
    of a call are raised as one UserError, and so is a path of thousands of characters.
    """

    @functools.wraps(function)
    def call(*values: Parameters.args, **options: Parameters.kwargs) -> Returned:
        values, options = validated(function, values, options)  # type: ignore[assignment]
        try:
            return function(*values, **options)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            name = shortened(str(error.filename))
            raise UserError(f"mindllm.{function.__name__}: {name}: {error.strerror}") from None

    return call


def validated(
    function: Callable[..., Any], values: Sequence[Any], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as the function takes them.

    Raises:
        UserError: some are invalid.
    """
    from pydantic import ValidationError

    problems = dict[str, Problem]()
    try:
        arguments, keywords = _validator(function)(*map(_plain, values), **{k: _plain(v) for k, v in options.items()})
    except ValidationError as error:
        problems = {problem.key: problem for problem in _problems(function, error, values, options)}
    names = [name for name, kind in inspect.signature(function).parameters.items() if kind.kind is not kind.VAR_KEYWORD]
    for name in options.keys() - {*names}:
        # an unknown option of a function with **options is a key of a section, unless it is a misspelt argument
        if name in problems or get_close_matches(name, names, cutoff=ALIKE):
            message = f"unknown argument (value {shortened(text_of(options[name], repr))}){nearest(name, names)}"
            problems[name] = _problem(function, name, message, options[name])
    if problems:
        raise UserError.of(*problems.values())
    return arguments, keywords


@functools.cache
def _validator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same signature that validates its arguments and returns them."""
    from pydantic import ConfigDict, validate_call

    def collect(*values: Any, **options: Any) -> Any:
        return values, options

    collect.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    collect.__annotations__ = dict(_hints(function))
    collect.__name__ = function.__name__
    return validate_call(config=ConfigDict(strict=True, arbitrary_types_allowed=True))(collect)


@functools.cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of the arguments.

    ``argument_types`` of the module returns the types that it imports for type checkers only.
    """
    from pydantic import InstanceOf

    def arguments() -> None: ...

    arguments.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    lazy_types = function.__globals__.get("argument_types", dict)()
    names: dict[str, Any] = {name: InstanceOf[kind] for name, kind in lazy_types.items()}  # type: ignore[misc,valid-type]
    names["Progress"] = Callable[..., None]  # pydantic cannot test instances of a protocol
    return get_type_hints(arguments, function.__globals__, names, include_extras=True)


def _plain(value: Any) -> Any:
    """Return numbers of numpy as those of Python, and iterables as tuples of them."""
    # a model iterates over its fields, and a text over its characters
    is_other = isinstance(value, str | bytes | Mapping) or hasattr(type(value), "model_fields")
    return tuple(map(_plain_number, value)) if isinstance(value, Iterable) and not is_other else _plain_number(value)


def _plain_number(value: Any) -> Any:
    if type(value).__name__ == "bool_":
        return bool(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _problems(
    function: Callable[..., Any], error: Any, values: Sequence[Any], options: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield a problem for each argument that pydantic refuses."""
    parameters = inspect.signature(function).parameters
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    details: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        place: Any = detail["loc"][0] if detail["loc"] else ""
        beyond = isinstance(place, int) and place >= len(positional)
        name = f"argument {place + 1}" if beyond else positional[place] if isinstance(place, int) else str(place)
        details.setdefault(name, []).append(detail)
    for name, refusals in details.items():
        kinds = {detail["type"] for detail in refusals}
        value = options.get(name, values[positional.index(name)] if name in positional[: len(values)] else None)
        shown = f"(value {shortened(text_of(value, repr))})"
        if name not in parameters:
            value = refusals[0]["input"]
            keywords = ", ".join(known for known in parameters if known not in positional)
            message = f"must be passed by name (value {shortened(text_of(value, repr))}); names: {keywords}"
        elif "multiple_argument_values" in kinds:
            value, message = (
                options[name],
                f"is passed twice (value {shortened(text_of(options[name], repr))}); remove one",
            )
        elif kinds & {"missing_argument", "missing_positional_only_argument", "missing_keyword_only_argument"}:
            value, message = None, f"{MISSING}{_meaning(function, name)}"
        else:
            # of a union, the alternative that was entered says more than the others
            items = [detail for detail in refusals if len(detail["loc"]) > 1 and isinstance(detail["loc"][-1], int)]
            expected = dict.fromkeys(map(_expected, items or refusals))
            subject = "each item must be" if items else "must be"
            message = f"{subject} {' or '.join(expected)} {shown}{_fix(function, name, value)}"
        yield _problem(function, name, message, value)


def _problem(function: Callable[..., Any], name: str, message: str, value: Any) -> Problem:
    return Problem(Origin(option=f"mindllm.{function.__name__}"), (name,), message, value)


def _expected(detail: Any) -> str:
    context = detail.get("ctx", {})
    if "[key]" in detail["loc"]:
        return "a dictionary with text as keys"
    if detail["type"] == "is_instance_of":
        return CLASSES.get(context["class"], f"a {context['class']}")
    form = EXPECTED.get(detail["type"])
    return detail["msg"].lower() if form is None else form.format(**context)


def _fix(function: Callable[..., Any], name: str, value: Any) -> str:
    """Return the fix: the advice of the annotation, the value in a valid form, or the meaning of the argument."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    hint = _hints(function)[name]
    if value is None and inspect.signature(function).parameters[name].default is not inspect.Parameter.empty:
        return "; leave it out"
    if note := next(_notes(hint), None):
        return f"; {note.text}"
    adapter = TypeAdapter[Any](hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    for form in _forms(value):
        try:
            return f"; write {adapter.validate_python(form)!r}"
        except ValidationError:
            continue
    return _meaning(function, name)


def _notes(hint: Any) -> Iterator[Advice]:
    """Yield the advice of an annotation and of the alternatives in it."""
    for part in (*get_args(hint), *getattr(hint, "__metadata__", ())):
        if isinstance(part, Advice):
            yield part
        elif get_args(part):
            yield from _notes(part)


def _forms(value: Any) -> Iterator[Any]:
    """Yield other forms of a value: a list of it, the number in a text, an integer, True or False."""
    yield [value]
    if isinstance(value, str):
        for kind in (int, float):
            try:
                yield kind(value)
            except ValueError:
                continue
    elif isinstance(value, Real) and value in (0, 1):
        yield bool(value)
    if isinstance(value, float) and value.is_integer():
        yield int(value)


def _meaning(function: Callable[..., Any], name: str) -> str:
    """Return what the docstring says about an argument; empty without docstrings (``python -OO``)."""
    entry = re.search(rf"^ +{name}: (.*(?:\n {{8}} *\S.*)*)", inspect.getdoc(function) or "", re.MULTILINE)
    text = " ".join(entry.group(1).split()) if entry else ""
    return f"; {name}: {text.removesuffix('.').replace('``', chr(39))}" if text else ""
