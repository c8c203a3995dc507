"""``recompute``: what was asked for, what the compiler really repeats, what that saves, and why a pattern has no effect."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mindllm.compiled.graph.compiled_graph import CALL, COLLECTIVES, PARTIAL, Node, TensorType, tensors_of
from mindllm.compiled.graph.cost import bytes_of
from mindllm.compiled.graph.operators import (
    BACKWARD,
    FORWARD,
    ORDERING,
    RECOMPUTED,
    UNIQUE,
    Operators,
    is_flagged,
    layer_of,
    without_numbers,
)
from mindllm.compiled.inspect.source import Inspected
from mindllm.compiled.inspect.tables import size_text, table_parts
from mindllm.config.recompute import LEVEL_SEPARATOR, names_operator

if TYPE_CHECKING:
    from mindllm.results import Part

PASSING = frozenset({"Depend", "Load"})
VIEWS = frozenset({"Reshape", "ExpandDims", "Squeeze"})
WITHOUT_READING = ORDERING - {"TensorMove"} | VIEWS


@dataclass(frozen=True)
class Storage:
    """Memory: an output of a node, or an input of a function."""

    owner: str
    index: int = 0


class KeptTensors:
    """Reads a graph once; answers for any set of repetitions taken away."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self._storages: dict[str, Storage | None] = {}

    @cached_property
    def repetitions(self) -> Mapping[str, Node]:
        """The original of every repeated operator, by the name of the repetition."""
        originals = {self._pair(node): node for node in self.operators.nodes if not self.operators.repeats(node)}
        copies = filter(self.operators.repeats, self.operators.nodes)
        return {node.name: originals[self._pair(node)] for node in copies if self._pair(node) in originals}

    def _pair(self, node: Node) -> tuple[Any, ...]:
        """Return a key that only an operator and its repetition share."""
        number = node.primal.get("recompute_id", node.primal.get(UNIQUE, node.name))
        return node.op, number, self.operators.graph_of(node)

    @cached_property
    def _readers(self) -> list[tuple[Node, tuple[Storage, ...]]]:
        """Operators of the backward pass and repetitions, with the memory they read."""
        phases = (BACKWARD, RECOMPUTED)
        readers = [node for node in self.operators.nodes if self.operators.phase(node) in phases]
        return [(node, self.read(node)) for node in readers if node.op not in WITHOUT_READING]

    def read(self, node: Node) -> tuple[Storage, ...]:
        """Yield the memory that a node reads."""
        parts: list[str] = []
        for name in node.inputs:
            source = self.operators.named.get(name)
            parts += source.inputs if source is not None and source.op == "MakeTuple" else [name]
        return tuple(storage for storage in map(self.storage, parts) if storage)

    def storage(self, name: str) -> Storage | None:
        """Return the memory of a name; None for parameters, constants and monads."""
        if name not in self._storages:
            self._storages[name] = self._find(name)
        return self._storages[name]

    def kept(self, without: Collection[str] = ()) -> frozenset[Storage]:
        """Memory of the forward pass that is kept, if the repetitions named in ``without`` were not made."""
        found = set()
        for node, storages in self._readers:
            if node.name in without:
                continue
            for storage in storages:
                original = self.repetitions.get(storage.owner) if storage.owner in without else None
                found.add(Storage(original.name, storage.index) if original is not None else storage)
        return frozenset(storage for storage in found if self._of_forward_pass(storage))

    def readers(self, storage: Storage) -> Iterable[Node]:
        """Operators of the backward pass, and repetitions, that read it."""
        return (node for node, storages in self._readers if storage in storages)

    def size(self, storages: Iterable[Storage]) -> int:
        """Bytes."""
        return bytes_of(tensor for storage in storages if (tensor := self.tensor(storage)) is not None)

    def tensor(self, storage: Storage) -> TensorType | None:
        """Return the tensor in a memory."""
        tensors = list(tensors_of(self.operators.graph.types[storage.owner]))
        return tensors[storage.index] if storage.index < len(tensors) else None

    @cached_property
    def bound(self) -> Mapping[str, str]:
        """What inputs of functions are given by their first call, or by the closure of a backward pass."""
        graph, found = self.operators.graph, dict[str, str]()
        for node in self.operators.nodes:
            if node.op not in (CALL, PARTIAL):
                continue
            name, given = (node.callee, node.inputs) if node.op == CALL else (node.inputs[0], node.inputs[1:])
            if graph.is_function(name):
                for bound, value in zip(graph.function(name).inputs, given, strict=False):
                    found.setdefault(bound.name, value)
        return found

    def _find(self, name: str) -> Storage | None:
        node = self.operators.named.get(name)
        while name in self.bound or (node is not None and node.op in PASSING | VIEWS):
            name = self.bound[name] if name in self.bound or node is None else node.inputs[0]
            node = self.operators.named.get(name)
        kind = self.operators.graph.types.get(name)
        if node is None:
            return Storage(name) if isinstance(kind, TensorType) and not kind.parameter else None
        if node.op == "TupleGetItem":
            return self._item(node)
        return Storage(name) if next(iter(tensors_of(node.type)), None) is not None else None

    def _item(self, node: Node) -> Storage | None:
        index = self.operators.graph.constants.get(node.inputs[1], 0)
        source = self.operators.named.get(node.inputs[0])
        while source is not None and source.op in PASSING:
            source = self.operators.named.get(source.inputs[0])
        if source is not None and source.op == "MakeTuple":
            return self.storage(source.inputs[index])
        return Storage(source.name, index) if source is not None else None

    def _of_forward_pass(self, storage: Storage) -> bool:
        """Return True for an activation, and False for copies of weights that all micro-batches share."""
        node = self.operators.named.get(storage.owner)
        return (node is None or self.operators.phase(node) == FORWARD) and not self.operators.parameter(storage.owner)


WHOLE_LAYER = "recompute"
COMMUNICATION = "recompute_comm_op"
PASSED_ON = ORDERING | VIEWS | {"Cast"}
SMALL = 0.05
"""A pattern has no effect when it saves less than this part of what its operators yield."""


@dataclass(frozen=True)
class Pattern:
    """A key and a pattern of ``recompute_config``, or where there is no configuration, a place: with the layers it is for."""

    key: str
    text: str
    layers: frozenset[int] | None = None


@dataclass(frozen=True)
class Effect:
    """What became of a pattern on this rank.

    Attributes:
        matched: operators it names, forward. flagged: of these, marked for recomputation. repeated: of these, really repeated.
        saved: bytes that the backward pass need not find kept, because of this pattern alone, per micro-batch.
        yielded: bytes the matched operators yield, views aside: what could be saved at best.
        why: where it saves next to nothing, the reason and what to write.
    """

    key: str
    pattern: str
    layers: tuple[int, ...]
    matched: int
    flagged: int
    repeated: int
    saved: int
    yielded: int
    why: str = ""


@dataclass(frozen=True)
class Recomputation:
    """All patterns, and what they save together."""

    effects: tuple[Effect, ...]
    kept: int
    saved: int


def recomputation(inspected: Inspected) -> Recomputation:
    """Per pattern of the configuration; without one, per place of what is flagged."""
    reader = _Reader(Operators(inspected.graph))
    patterns = _of_configuration(inspected) if inspected.config else _of_graph(reader)
    effects = tuple(reader.effect(pattern) for pattern in patterns)
    now, before = reader.kept.kept(), reader.kept.kept(reader.kept.repetitions.keys())
    kept = reader.kept.size(now)
    return Recomputation(effects, kept, reader.kept.size(before) - kept)


def recomputation_parts(found: Recomputation) -> Iterator[Part]:
    """Yield a table, and the reasons below it."""
    numbers = ["matched", "flagged", "repeated", "saved", "at best"]
    rows = [
        (
            effect.key,
            "all operators" if effect.pattern == WHOLE_LAYER else effect.pattern,
            _layers_text(effect.layers),
            effect.matched,
            effect.flagged,
            effect.repeated,
            size_text(effect.saved),
            size_text(effect.yielded),
        )
        for effect in found.effects
    ]
    title = f"{size_text(found.kept)} kept for the backward pass per micro-batch; recomputation saves {size_text(found.saved)}"
    yield from table_parts(title, ["key", "pattern", "layers", *numbers], rows, numbers)
    for effect in found.effects:
        if effect.why:
            yield f"{effect.pattern}: {effect.why}\n"


def as_json(found: Recomputation) -> dict[str, Any]:
    """Return all fields."""
    return asdict(found)


class _Reader:
    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self.kept = KeptTensors(operators)
        self.candidates = [
            (node, *where)
            for node in operators.nodes
            if operators.phase(node) == FORWARD
            and node.op not in ORDERING
            and (where := layer_of(operators.place(node)))
        ]

    def effect(self, pattern: Pattern) -> Effect:
        """Look for the operators of a pattern, their flags and their repetitions."""
        matched = [item for item in self.candidates if self._matches(pattern, *item)]
        nodes = [node for node, *_ in matched]
        communication = "comm" in pattern.key
        expected = [other for node in nodes for other in self._exchanges_beside(node)] if communication else nodes
        names = {node.name for node in expected}
        repetitions = {copy for copy, original in self.kept.repetitions.items() if original.name in names}
        originals = {self.kept.repetitions[copy].name for copy in repetitions}
        now, without = self.kept.kept(), self.kept.kept(repetitions)
        saved = self.kept.size(without) - self.kept.size(now)
        yielded = sum(bytes_of(node.tensors) for node in expected if node.op not in VIEWS)
        flagged = [
            node for node in nodes if (node.attributes.get(COMMUNICATION) if communication else is_flagged(node))
        ]
        excluded = pattern.key.endswith("exclude")
        small = not excluded and saved <= SMALL * yielded and (yielded > 0 or not originals)
        return Effect(
            key=pattern.key,
            pattern=pattern.text,
            layers=tuple(sorted({number for _, number, _ in matched})),
            matched=len(nodes),
            flagged=len(flagged),
            repeated=len(originals),
            saved=saved,
            yielded=yielded,
            why=self._why(expected, repetitions, now) if small else "",
        )

    def _matches(self, pattern: Pattern, node: Node, layer: int, rest: str) -> bool:
        if pattern.layers is not None and layer not in pattern.layers:
            return False
        if pattern.text == WHOLE_LAYER:
            return True
        name = node.op if node.op in COLLECTIVES else node.instance or node.op
        return names_operator(pattern.text, f"{rest}.{name}" if rest else name)

    def _exchanges_beside(self, node: Node) -> Iterator[Node]:
        """Return the collectives next to an operator that the compiler inserted, across conversions."""
        for step in (self.operators.consumers, self.operators.producers):
            following = list(step(node))
            for other in following:
                if other.op in COLLECTIVES and self.operators.phase(other) == FORWARD:
                    yield other
                elif other.op in PASSED_ON and len(following) < len(self.candidates):
                    following += step(other)

    def _why(self, nodes: Sequence[Node], repetitions: Collection[str], now: frozenset[Storage]) -> str:
        """Return the most frequent reason that nothing is saved."""
        if not nodes:
            return "matches no operator of this rank"
        copies = {self.kept.repetitions[copy].name: self.operators.named[copy] for copy in repetitions}
        reasons: dict[str, int] = defaultdict(int)
        for node in nodes:
            copy = copies.get(node.name)
            found = [self._kept_behind(node, now), self._kept_before(copy, now) if copy else ""]
            reasons["; and ".join(filter(None, found)) or _unused(node, copy is not None)] += 1
        return max(reasons, key=lambda reason: reasons[reason])

    def _kept_behind(self, node: Node, now: frozenset[Storage]) -> str:
        """Return a view or conversion of the result that is not recomputed, and so is kept instead of it."""
        for user in self._passed_on_by(node):
            storage = self.kept.storage(user.name)
            if user.op not in PASSED_ON or is_flagged(user) or storage is None:
                continue
            readers = [reader for reader in self.kept.readers(storage) if user.name in self._behind(reader)]
            if storage in now and readers:
                same = "the same memory" if user.op in VIEWS else size_text(self.kept.size([storage]))
                return (
                    f"the {user.op} behind it in {self._where(user)} is not recomputed: its result, {same}, is kept for "
                    f"{readers[0].op} of the backward pass; {self._select(user)}"
                )
        return ""

    def _kept_before(self, copy: Node, now: frozenset[Storage]) -> str:
        """Return a conversion of the input that is not recomputed, and so is kept for the repetition."""
        for storage in self.kept.read(copy):
            source = self.operators.named.get(storage.owner)
            tensor = self.kept.tensor(storage)
            if source is not None and source.op in PASSED_ON and not is_flagged(source) and storage in now and tensor:
                return (
                    f"the {source.op} before it in {self._where(source)} is not recomputed: its {tensor.dtype} result "
                    f"({size_text(self.kept.size([storage]))}) is kept to repeat from; {self._select(source)}"
                )
        return ""

    def _passed_on_by(self, node: Node) -> Iterator[Node]:
        """Operators that view or convert a result, in order."""
        waiting = [node]
        for current in waiting:
            for user in self.operators.users.get(current.name, ()):
                if user.op in PASSED_ON and user.op != "MakeTuple" and self.operators.phase(user) == FORWARD:
                    waiting.append(user)
                    yield user

    def _behind(self, reader: Node) -> set[str]:
        """Names a reader reads by, past what passes values on."""
        found = set(reader.inputs)
        waiting = list(reader.inputs)
        for name in waiting:
            name = self.kept.bound.get(name, name)
            found.add(name)
            source = self.operators.named.get(name)
            if source is not None and source.op in ORDERING | VIEWS:
                waiting += source.inputs
        return found

    def _where(self, node: Node) -> str:
        place = layer_of(self.operators.place(node))
        return place[1] if place else self.operators.place(node)

    def _select(self, node: Node) -> str:
        if not node.instance or node.instance.isdigit():
            return "it has no name in its cell that a pattern could select"
        return f"select it too: '{LEVEL_SEPARATOR.join([*self._where(node).split('.'), node.instance])}'"


def _unused(node: Node, repeated: bool) -> str:
    if not is_flagged(node):
        return f"{node.op} is not flagged: an exclusion, or an operator the compiler made itself"
    if repeated:
        return f"gradients read only a small part of what {node.op} yields; the rest was not kept anyway"
    return f"no gradient reads what {node.op} yields, so there is nothing to repeat; leave the pattern out"


def _of_configuration(inspected: Inspected) -> Iterator[Pattern]:
    """Return the keys and patterns of a run."""
    from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, make_plan

    assert inspected.config
    plan = make_plan(inspected.config)
    whole = frozenset(number for number, layer in enumerate(plan.layers) if layer.recompute)
    if whole:
        yield Pattern(WHOLE_LAYER, WHOLE_LAYER, whole)
    for key in DEFAULT_PATTERNS:
        for text in plan.named(key):
            layers = (number for number, layer in enumerate(plan.layers) if text in layer.applied(key))
            yield Pattern(key, text, frozenset(layers))


def _of_graph(reader: _Reader) -> Iterator[Pattern]:
    """Without a configuration: layers whose every product is flagged, and the places of what is flagged elsewhere."""
    products: dict[int, set[bool]] = defaultdict(set)
    for node, number, _ in reader.candidates:
        if node.op in ("MatMul", "BatchMatMul"):
            products[number].add(is_flagged(node))
    whole = frozenset(number for number, flags in products.items() if flags == {True})
    if whole:
        yield Pattern(WHOLE_LAYER, WHOLE_LAYER, whole)
    places: dict[str, set[int]] = defaultdict(set)
    for node, number, rest in reader.candidates:
        if is_flagged(node) and number not in whole:
            name = node.op if node.op in COLLECTIVES else node.instance or node.op
            path = [*without_numbers(rest).split("."), name]
            places[LEVEL_SEPARATOR.join(filter(None, path))].add(number)
    for text, layers in places.items():
        yield Pattern("flagged", text, frozenset(layers))


def _layers_text(layers: Iterable[int]) -> str:
    """``0-3, 8``."""
    parts: list[list[int]] = []
    for number in layers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts) or "-"
