"""A machine for the few instructions of pickle that a dictionary of tensors is written with; it never calls what a file names.

Python's own unpickler imports and calls what the file says, and a restricted one still lets a small file take all memory. Here a
global is a name in a fixed table, a call is one of five constructions of plain values, everything else is refused by name.
The instructions are those of Python's pickletools, which parses without executing.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 10_000_000  # a model of 100,000 tensors takes three million
MARK = object()


class RefusedPickleError(ValueError):
    """The pickle holds something else than tensors by name; the message names it."""


@dataclass(frozen=True)
class Name:
    """A global of the file, such as ``torch FloatStorage``: a name, nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


Construction = Callable[[tuple[Any, ...]], Any]


def unpickle(
    content: bytes, constructions: Mapping[str, Construction], names: frozenset[str], persistent: Construction
) -> Any:
    """The value that ``content`` describes, made of None, numbers, text, tuples, lists, dictionaries and constructions.

    Arguments:
        constructions: what a call of such a global gives, by its full name; nothing else is called.
        names: further globals that may stand as values, uncalled.
        persistent: what a reference to a part outside of the pickle gives.

    Raises:
        RefusedPickleError: anything else, or no pickle.
    """
    machine = _Machine(constructions, names, persistent)
    try:
        for step, (code, argument, _) in enumerate(pickletools.genops(content)):
            if step > MOST_STEPS:
                raise RefusedPickleError(f"it has over {MOST_STEPS:,} instructions")
            machine.execute(code.name, argument)
    except RefusedPickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, StopIteration, RecursionError) as error:
        raise RefusedPickleError(f"it is no whole pickle ({type(error).__name__}: {error})") from None
    if len(machine.stack) != 1:
        raise RefusedPickleError(f"it leaves {len(machine.stack)} values, not one")
    return machine.stack[0]


class _Machine:
    def __init__(
        self, constructions: Mapping[str, Construction], names: frozenset[str], persistent: Construction
    ) -> None:
        self.stack: list[Any] = []
        self._constructions = constructions
        self._names = names
        self._persistent = persistent
        self._memo: dict[int, Any] = {}

    def execute(self, code: str, argument: Any) -> None:
        if code in _PUSHES:
            self.stack.append(argument)
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code]())
        elif code in _IGNORED:
            return
        else:
            action = getattr(self, f"_{code.lower()}", None)
            if action is None:
                raise RefusedPickleError(f"it holds the instruction {code}, which no dictionary of tensors needs")
            action(argument)

    def _mark(self, _: Any) -> None:
        self.stack.append(MARK)

    def _stop(self, _: Any) -> None:
        return

    def _put(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    _binget = _long_binget = _get

    def _global(self, both: str) -> None:
        module, _, name = both.partition(" ")
        self._push_name(module, name)

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._push_name(str(module), str(name))

    def _push_name(self, module: str, name: str) -> None:
        found = Name(module, name)
        if str(found) not in self._constructions and str(found) not in self._names:
            raise RefusedPickleError(f"it holds {found}, which is no tensor and is not run")
        self.stack.append(found)

    def _binpersid(self, _: Any) -> None:
        self.stack.append(self._persistent((self.stack.pop(),)))

    def _reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        construction = self._constructions.get(str(function)) if isinstance(function, Name) else None
        if construction is None or not isinstance(arguments, tuple):
            raise RefusedPickleError(f"it calls {kind_of(function)}, which is no tensor and is not run")
        self.stack.append(construction(arguments))

    def _build(self, _: Any) -> None:
        """Attributes of a dictionary (``_metadata`` of a state_dict) are dropped; other objects have none here."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise RefusedPickleError(f"it sets attributes of {kind_of(self.stack[-1])}")

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._above_mark()))

    def _tuple1(self, _: Any) -> None:
        self.stack[-1:] = [tuple(self.stack[-1:])]

    def _tuple2(self, _: Any) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _tuple3(self, _: Any) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def _list(self, _: Any) -> None:
        self.stack.append(self._above_mark())

    def _dict(self, _: Any) -> None:
        items = self._above_mark()
        self.stack.append({})
        self._set(items)

    def _append(self, _: Any) -> None:
        item = self.stack.pop()
        self._target(list).append(item)

    def _appends(self, _: Any) -> None:
        items = self._above_mark()
        self._target(list).extend(items)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _setitems(self, _: Any) -> None:
        self._set(self._above_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._target(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):  # a tuple of tuples, hashed, could overflow the stack
                raise RefusedPickleError(f"it has {kind_of(key)} as the key of a dictionary")
            target[key] = value

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _target(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise RefusedPickleError(f"it adds items to {kind_of(self.stack[-1])}")
        return self.stack[-1]

    def _above_mark(self) -> list[Any]:
        start = next(index for index in range(len(self.stack) - 1, -1, -1) if self.stack[index] is MARK)
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items


_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG1", "FLOAT", "BINFLOAT")
_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING")
_PUSHES = frozenset((*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES"))
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_IGNORED = frozenset({"PROTO", "FRAME"})


def kind_of(value: Any) -> str:
    """What a value is, in a few words: its own text could be of any length."""
    return str(value) if isinstance(value, Name) else f"a value of type {type(value).__name__}"
