"""YAML (safe tags only) to a :class:`Document` that remembers lines, and back; numbers as YAML 1.2 has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mindllm import outside
from mindllm.config.reading.document import Document, KeyPath, Origin, Problem
from mindllm.config.reading.syntax import syntax_advice
from mindllm.errors import UserError
from mindllm.outside import half_surrogate

TAGS = {
    f"tag:yaml.org,2002:{tag}": name
    for tag, name in {"int": "integer a machine computes with", "float": "number", "bool": "true or false"}.items()
}
LONGEST_VALUE = 60
MAPPING, SEQUENCE, NULL = (f"tag:yaml.org,2002:{tag}" for tag in ("map", "seq", "null"))
DEEPEST = 50  # levels
LARGEST_TREE = 100_000  # values; aliases of aliases can describe more than a memory holds


class PlainLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that ``1e-5`` is a number and ``2024-01-01`` stays text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def save_possible_simple_key(self) -> None:
        """Called for every entry: refuses a nesting that would take PyYAML minutes before it gives up."""
        if self.flow_level + len(self.indents) > DEEPEST:
            mark = self.get_mark()
            raise yaml.scanner.ScannerError(None, None, f"nested more than {DEEPEST} levels deep", mark)
        super().save_possible_simple_key()


class PlainDumper(yaml.SafeDumper):
    """PyYAML's dumper, except that it quotes what :class:`PlainLoader` would not read back as the same text."""


def _represent_text(dumper: PlainDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


def _represent_list(dumper: PlainDumper, items: list[Any]) -> yaml.SequenceNode:
    """Lists of numbers, and of such lists, on one line, as people write them."""
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=_is_plain(items))


def _is_plain(items: list[Any]) -> bool:
    return all(
        _is_plain(item) if isinstance(item, list) else item is None or isinstance(item, int | float) for item in items
    )


EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
PlainDumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
PlainDumper.add_representer(str, _represent_text)
PlainDumper.add_representer(list, _represent_list)


def write_yaml(data: dict[str, Any]) -> str:
    """Returns plain ``data`` as YAML, keys in their order; :func:`read_yaml` gives the same data."""
    return yaml.dump(data, Dumper=PlainDumper, sort_keys=False, width=120, allow_unicode=True)


def read_yaml(text: str, name: str) -> Document:
    """Parses ``text``, reported as the file ``name``; raises ``UserError`` on broken syntax."""
    return _read(text, lambda line: Origin(name, line))


def read_value(text: str, option: str) -> Any:
    """Parses the value of a command line option."""
    document = _read(f"value: {text}" if "\n" not in text else text, lambda line: Origin(option=option))
    return document.data.get("value")


def without_quotes(text: str) -> Any:
    """Returns what YAML reads ``text`` as where it stands without quotes: ``1`` and ``true`` are no texts."""
    loader = PlainLoader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    return loader.construct_object(node) if node.tag in (*TAGS, NULL) else text


def _read(text: str, origin) -> Document:
    try:
        loader = PlainLoader(text)
        node = loader.get_single_node()
        reader = _Reader(loader, origin)
        data = reader.value(node, ()) if node is not None else {}
    except yaml.YAMLError as error:
        raise UserError.of(_syntax_problem(error, origin, text)) from None
    except RecursionError:
        raise UserError.of(Problem(origin(None), (), "not valid YAML: nested too deeply")) from None
    if not isinstance(data, dict):
        message = f"the file must be a mapping of keys to values, not {type(data).__name__}"
        raise UserError.of(Problem(origin(1), (), message))
    return Document(data, reader.origins, reader.problems)


def unusable_text(value: Any) -> str:
    """Why no configuration may hold ``value``, a text or a tree with texts that no file, path or prompt takes; else empty."""
    if isinstance(value, dict):
        return next(filter(None, map(unusable_text, (*value, *value.values()))), "")
    if isinstance(value, list | tuple):
        return next(filter(None, map(unusable_text, value)), "")
    usable = not isinstance(value, str) or not ("\0" in value or half_surrogate(value))
    return "" if usable else "a text with a null character or half of a surrogate pair"


def _syntax_problem(error: yaml.YAMLError, origin, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    where = origin(mark.line + 1 if mark else None)
    column = f" (column {mark.column + 1})" if mark else ""
    advice = syntax_advice(text.splitlines(), mark.line, reason) if mark else ""
    return Problem(where, (), f"not valid YAML: {reason}{f', {context}' if context else ''}{column}{advice}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


class _Reader:
    """Turns composed nodes into plain values and notes where each one stands."""

    def __init__(self, loader: PlainLoader, origin) -> None:
        self.loader, self.origin = loader, origin
        self.origins: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.flattened: set[int] = set()
        self.count = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if id(node) in self.open or self.count > LARGEST_TREE:
            raise yaml.constructor.ConstructorError(None, None, "aliases make the file endless", node.start_mark)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == MAPPING:
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == SEQUENCE:
                return [self._entry(child, (*path, index)) for index, child in enumerate(node.value)]
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node)
            raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not allowed", node.start_mark)
        finally:
            self.open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if problem := unusable_text(node.value):
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return self.loader.construct_object(node)
        except (ValueError, KeyError):  # an explicit tag that the text does not fit, as in `!!int x`
            raise yaml.constructor.ConstructorError(
                None, None, f"'{_cut(node.value)}' is no {TAGS.get(node.tag, node.tag)}", node.start_mark
            ) from None

    def _entry(self, node: yaml.Node, path: KeyPath) -> Any:
        self.origins[path] = self.origin(node.start_mark.line + 1)
        return self.value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        if id(node) not in self.flattened:
            self._report_duplicates(node, path)
            self.loader.flatten_mapping(node)  # the merge key `<<`
            self.flattened.add(id(node))
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            inner = (*path, key)
            self.origins[inner] = self.origin(key_node.start_mark.line + 1)
            result[key] = self.value(value_node, inner)
        return result

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", node.start_mark)
        return node.value

    def _report_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in lines:
                message = (
                    f"the key stands here again; it is already on line {lines[key_node.value]}; remove one of them"
                )
                self.problems.append(Problem(self.origin(line), (*path, key_node.value), message))
            lines.setdefault(key_node.value, line)


def read_mapping(path: Path) -> Mapping:
    """Return the mapping that a YAML file holds."""
    try:
        text = outside.read_text(path, outside.LARGEST_YAML)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    content = read_yaml(text, str(path)).data
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: must hold a mapping, not {type(content).__name__}")
    return content
