"""Calls between two processes: one runs a test that is trusted, the other one a program of unknown origin.

The program sees the arguments of each call and nothing else: not the test, its expected values, or the verdict, which is the
exit code of the process of the test. Values travel as JSON with the name of their type, so nothing that the program sends is
code. Imports nothing of the project: :mod:`mindllm.evaluate.code_child` loads it before it gives up its rights.
"""

import builtins
import json
import os
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from types import CodeType
from typing import Any

LARGEST_MESSAGE = 64 << 20
CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
PLAIN: dict[str, Callable[[list], Any]] = {**CONTAINERS, "iterator": iter}
TEXTS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "Decimal": Decimal,
    "Fraction": Fraction,
}


def encode(value: Any) -> Any:
    """Return a value as JSON; an object of any other type has no value."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of NumPy
        value = value.item()
    match value:
        case None | bool() | str():
            return value
        case int():
            return ["int", hex(value)]
        case float():
            return ["float", float(value).hex()]
        case complex():
            return ["complex", [value.real.hex(), value.imag.hex()]]
        case bytes() | bytearray():
            return ["bytes", bytes(value).hex()]
        case Decimal() | Fraction():
            return [type(value).__name__, str(value)]
        case range():
            return ["range", [hex(each) for each in (value.start, value.stop, value.step)]]
        case dict():
            return ["dict", [[encode(key), encode(each)] for key, each in value.items()]]
    kind = next((name for name, known in CONTAINERS.items() if isinstance(value, known)), None)
    if kind or isinstance(value, Iterator):
        return [kind or "iterator", [encode(each) for each in value]]
    return ["object", None]


def decode(value: Any) -> Any:
    """Return the inverse of :func:`encode`; an object without a value equals nothing."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind in PLAIN:
        return PLAIN[kind]([decode(each) for each in content])
    if kind in TEXTS:
        return TEXTS[kind](content)
    if kind == "dict":
        return {decode(key): decode(each) for key, each in content}
    if kind == "range":
        return range(*(int(each, 16) for each in content))
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    return object()


class Channel:
    """Messages to the other process and back, one a line."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")

    def send(self, message: object) -> None:
        """Send a message."""
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def receive(self) -> dict:
        """Return the next message; raise EOFError if the other process has ended."""
        line = self._reader.readline(LARGEST_MESSAGE)
        if not line.endswith(b"\n"):
            raise EOFError("the other process has ended")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise TypeError("not a message")
        return message


def run_program(channel: Channel, source: str) -> None:
    """Run a program, then call its functions as the test asks; does not return before the test has ended."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<answer>", "exec"), names)
    channel.send({"ready": True})
    while True:
        request = channel.receive()
        channel.send(answer(names, request))


def answer(names: dict, request: dict) -> dict:
    """Return what a function of the program gives, or the kind of a name."""
    try:
        value = names[request["name"]]
        if "arguments" not in request:
            return {"callable": True} if callable(value) else {"value": encode(value)}
        arguments, options = decode(request["arguments"]), decode(request["options"])
        value = value(*arguments, **options)
        return {"value": encode(value), "arguments": encode(arguments)}
    except Exception as error:
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return {"error": known.__name__, "message": str(error)}


class TestNames(dict):
    """Global names of a test: those it does not define are the program's, except for builtins, which stay Python's."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(__name__="__main__")
        self._channel = channel

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            raise KeyError(name)
        found = self._ask({"name": name})
        if not found.get("callable"):
            return decode(found["value"])

        def call(*arguments: object, **options: object) -> object:
            reply = self._ask({"name": name, "arguments": encode(arguments), "options": encode(options)})
            for before, after in zip(arguments, decode(reply["arguments"]), strict=False):
                write_back(before, after)
            return decode(reply["value"])

        self[name] = call
        return call

    def _ask(self, request: dict) -> dict:
        self._channel.send(request)
        reply = self._channel.receive()
        if "error" not in reply:
            return reply
        kind = getattr(builtins, str(reply["error"]), None)
        if reply["error"] == "KeyError" and "arguments" not in request:
            raise NameError(f"name {request['name']!r} is not defined")
        is_known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)
        if is_known and kind is not None:
            raise kind(str(reply.get("message")))
        raise RuntimeError(str(reply.get("message")))


def write_back(before: Any, after: Any) -> None:
    """Give an argument the content that the program left it with."""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, dict | set):
        before.clear()
        before.update(after)


def run_test(channel: Channel, given: str, entry: str, test: str) -> None:
    """Run a test after ``given``, its own definitions, of which ``entry`` is what the program has to define."""
    if not channel.receive().get("ready"):
        raise RuntimeError("the program does not run")
    names = TestNames(channel)
    exec(compile_definitions(given), names)
    names.pop(entry, None)
    exec(compile(test, "<test>", "exec"), names)


def compile_definitions(given: str) -> CodeType:
    """Return the code of a problem's own text, which may end with the first line of the function that is asked for."""
    try:
        return compile(given, "<given>", "exec")
    except SyntaxError:
        return compile(f"{given.rstrip()}\n    pass\n", "<given>", "exec")


SIDES: dict[str, Callable[..., None]] = {"program": run_program, "test": run_test}


def run(role: str, sources: list, reader: int, writer: int) -> None:
    """Run a side and end this process: with 0 only where the whole test ran without an error."""
    try:
        channel = Channel(reader, writer)
        SIDES[role](channel, *sources)
    except BaseException:
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
