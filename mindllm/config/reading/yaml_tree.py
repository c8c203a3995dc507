"""YAML (safe tags only) to a :class:`Document` that records lines, and back; advice on syntax errors; numbers as in YAML 1.2."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from mindllm import outside
from mindllm.config.reading.document import Document, KeyPath, Origin, Problem
from mindllm.errors import UserError
from mindllm.outside import half_surrogate

LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # as YAML counts lines
TRAILING_COMMENT = re.compile(r"\s*:?\s+#\s*(?P<comment>.*)")
COMMENT_FROM = 2  # spaces before a comment
LONGEST_LINE = 130  # with a comment
TAGS = {
    f"tag:yaml.org,2002:{tag}": name
    for tag, name in {"int": "integer a machine computes with", "float": "number", "bool": "true or false"}.items()
}
LONGEST_VALUE = 60
MAPPING, SEQUENCE, NULL, TEXT, MERGE, EQUALS = (
    f"tag:yaml.org,2002:{tag}" for tag in ("map", "seq", "null", "str", "merge", "value")
)
WORDS = (TEXT, MERGE, EQUALS)  # `<<` and `=` as values are texts
SCALARS = (*TAGS, NULL, *WORDS)
DEEPEST = 50  # levels
LARGEST_TREE = 50_000  # keys and values of a file, and values once its aliases are expanded
LONGEST_NUMBER = 1000  # characters; a number in base 60 takes quadratic time
LARGEST_INTEGER = 10**LONGEST_NUMBER  # Python prints at most 4,300 digits


class PlainLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, except that ``1e-5`` is a number and ``2024-01-01`` stays text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def save_possible_simple_key(self) -> None:
        """Refuse a nesting that would take PyYAML minutes. Called for every entry."""
        if self.flow_level + len(self.indents) > DEEPEST:
            mark = self.get_mark()
            raise yaml.scanner.ScannerError(None, None, f"nested more than {DEEPEST} levels deep", mark)
        super().save_possible_simple_key()

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        """Compose a node; refuse a file with more values than any configuration has."""
        self.node_count = getattr(self, "node_count", 0) + 1
        if self.node_count > LARGEST_TREE:
            reason = f"the file has more than {LARGEST_TREE:,} keys and values"
            raise yaml.composer.ComposerError(None, None, reason, self.peek_event().start_mark)
        return super().compose_node(parent, index)


class PlainDumper(yaml.SafeDumper):
    """PyYAML's dumper, except that it quotes what :class:`PlainLoader` would not read back as the same text."""


def _represent_text(dumper: PlainDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


def _represent_list(dumper: PlainDumper, items: list[Any]) -> yaml.SequenceNode:
    """Write lists of numbers, and lists of such lists, on one line."""
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=_is_plain(items))


def _represent_flow(tag: str, dumper: yaml.SafeDumper, value: Any) -> yaml.Node:
    represent = dumper.represent_mapping if isinstance(value, dict) else dumper.represent_sequence
    return represent(tag, value, flow_style=True)


def _is_plain(items: list[Any]) -> bool:
    return all(
        _is_plain(item) if isinstance(item, list) else item is None or isinstance(item, int | float) for item in items
    )


class FlowDumper(PlainDumper):
    """Writes lists and mappings on one line."""


EXPONENT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
PlainDumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
PlainDumper.add_representer(str, _represent_text)
PlainDumper.add_representer(list, _represent_list)
for kind in (list, tuple):
    FlowDumper.add_representer(kind, partial(_represent_flow, "tag:yaml.org,2002:seq"))
FlowDumper.add_multi_representer(object, lambda dumper, value: _represent_text(dumper, str(value)))  # of a dictionary
FlowDumper.add_representer(dict, partial(_represent_flow, "tag:yaml.org,2002:map"))


def write_yaml(data: dict[str, Any]) -> str:
    """Return plain ``data`` as YAML with keys in order. :func:`read_yaml` restores the data."""
    return yaml.dump(data, Dumper=PlainDumper, sort_keys=False, width=120, allow_unicode=True)


def inline_yaml(value: Any) -> str:
    """Return a plain value on one line as YAML writes it; :func:`read_value` gives the same value."""
    text = yaml.dump(value, Dumper=FlowDumper, sort_keys=False, width=sys.maxsize, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def command_line_options(changes: Mapping[str, Any]) -> str:
    """Return dotted keys and their values as options that a shell takes as they are."""
    return " ".join(f"--{key}={shlex.quote(inline_yaml(value))}" for key, value in changes.items())


def write_commented(tree: Mapping[str, Any], comments: Mapping[KeyPath, str]) -> str:
    """Return a tree as YAML with comments, each after its value or on the line before."""
    return "".join(_commented_lines(tree, (), comments))


def _commented_lines(tree: Mapping[str, Any], path: KeyPath, comments: Mapping[KeyPath, str]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in tree.items():
        inner = (*path, key)
        comment = single_line(comments.get(inner, ""))
        if (
            isinstance(value, dict)
            and value
            and (not comment or any(other[: len(inner)] == inner != other for other in comments))
        ):
            yield f"{indent}# {comment}\n" if comment else ""
            yield f"{indent}{write_yaml({key: None}).rpartition(': null')[0]}:\n"
            yield from _commented_lines(value, inner, comments)
            continue
        written = write_yaml({key: value}).rstrip("\n").split("\n")
        together = f"{indent}{written[0]}{' ' * COMMENT_FROM}# {comment}"
        if comment and len(written) == 1 and len(together) <= LONGEST_LINE:
            yield f"{together}\n"
            continue
        yield f"{indent}# {comment}\n" if comment else ""
        yield from (f"{indent}{line}\n" for line in written)


def single_line(text: str) -> str:
    """Return ``text`` without line ends and other controls, so that a comment stays one."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def read_yaml(text: str, name: str) -> Document:
    """Parse ``text`` of the file ``name``; raise ``UserError`` on invalid syntax."""
    return _read(text, lambda line: Origin(name, line))


def read_value(text: str, option: str) -> Any:
    """Parse the value of a command line option."""
    document = _read(f"value: {text}" if "\n" not in text else text, lambda line: Origin(option=option))
    return document.data.get("value")


def without_quotes(text: str) -> Any:
    """Return the value that YAML reads for ``text`` without quotes, such as 1 for ``1``."""
    loader = PlainLoader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    if node.tag not in (*TAGS, NULL) or len(text) > LONGEST_NUMBER:
        return text
    try:
        return loader.construct_object(node)
    except (ArithmeticError, ValueError):
        return text


def _read(text: str, origin) -> Document:
    try:
        loader = PlainLoader(text)
        node = loader.get_single_node()
        reader = _Reader(loader, origin, LINE_END.split(text))
        data = reader.value(node, ()) if node is not None else {}
    except yaml.YAMLError as error:
        raise UserError.of(_syntax_problem(error, origin, text)) from None
    except RecursionError:
        raise UserError.of(Problem(origin(None), (), "not valid YAML: nested too deeply")) from None
    if not isinstance(data, dict):
        message = f"the file must be a mapping of keys to values, not {type(data).__name__}"
        raise UserError.of(Problem(origin(1), (), message))
    return Document(data, reader.origins, reader.problems)


def unusable_value(value: Any) -> str:
    """Return why no configuration may hold ``value``, or a value in a tree, which no file, path or prompt takes; else empty."""
    if isinstance(value, dict):
        return next(filter(None, map(unusable_value, (*value, *value.values()))), "")
    if isinstance(value, list | tuple):
        return next(filter(None, map(unusable_value, value)), "")
    if isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        return f"an integer of more than {LONGEST_NUMBER:,} digits"
    usable = not isinstance(value, str) or not ("\0" in value or half_surrogate(value))
    return "" if usable else "a text with a null character or half of a surrogate pair"


def _refusal(reason: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)


def _tag_name(node: yaml.Node) -> str:
    return node.tag.replace("tag:yaml.org,2002:", "!!")


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

    def __init__(self, loader: PlainLoader, origin, lines: list[str]) -> None:
        self.loader, self.origin, self.lines = loader, origin, lines
        self.origins: dict[KeyPath, Origin] = {}
        self.problems: list[Problem] = []
        self.open: set[int] = set()
        self.pairs: dict[int, dict[str, tuple[yaml.Node, yaml.Node]]] = {}
        self.count = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count(1, node)
        if isinstance(node, yaml.ScalarNode) and node.tag in SCALARS:
            if problem := unusable_value(node.value):
                raise _refusal(problem, node)
            if node.tag in WORDS:
                return node.value
            try:
                is_long = len(node.value) > LONGEST_NUMBER
                value = None if is_long else self.loader.construct_object(node)
                wrong = is_long or bool(unusable_value(value))
            except (
                ArithmeticError,
                IndexError,
                KeyError,
                ValueError,
            ):  # an explicit tag that the text does not fit: `!!int x`
                wrong = True
            if wrong:
                raise _refusal(f"'{_cut(node.value)}' is not a valid {TAGS.get(node.tag, node.tag)}", node)
            return value
        self._enter(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == MAPPING:
                result: dict[str, Any] = {}
                for key, (key_node, value_node) in self._merged_pairs(node, path).items():
                    inner = (*path, key)
                    comment = self._comment(key_node, value_node)
                    origin = self.origin(key_node.start_mark.line + 1)
                    self.origins[inner] = replace(origin, comment=comment) if comment else origin
                    result[key] = self.value(value_node, inner)
                return result
            if isinstance(node, yaml.SequenceNode) and node.tag == SEQUENCE:
                return [self._entry(child, (*path, index)) for index, child in enumerate(node.value)]
        finally:
            self.open.discard(id(node))
        raise _refusal(f"the tag {_tag_name(node)} is not allowed", node)

    def _count(self, values: int, node: yaml.Node) -> None:
        self.count += values
        if self.count > LARGEST_TREE:
            raise _refusal(f"aliases (*name) describe more than {LARGEST_TREE:,} values", node)

    def _enter(self, node: yaml.Node) -> None:
        if id(node) in self.open:
            raise _refusal("an alias is inside the value it refers to", node)
        self.open.add(id(node))

    def _entry(self, node: yaml.Node, path: KeyPath) -> Any:
        self.origins[path] = self.origin(node.start_mark.line + 1)
        return self.value(node, path)

    def _comment(self, key: yaml.Node, value: yaml.Node) -> str:
        """Return the comment after a key or a value on the same line; else the comment on the lines before."""
        first, last = key.start_mark.line, value.end_mark.line
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        mark = key.end_mark if is_block else value.end_mark
        if (is_block or first == last) and (match := TRAILING_COMMENT.match(self.lines[first][mark.column :])):
            return match["comment"]
        indent = " " * key.start_mark.column + "# "
        if self.lines[first][: key.start_mark.column].strip():
            return ""  # not the first key on its line
        start = first
        while start and self.lines[start - 1].startswith(indent):
            start -= 1
        # a comment from the first line on is about the file
        return " ".join(line[len(indent) :].strip() for line in self.lines[start:first]) if start else ""

    def _merged_pairs(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return the entries of a mapping by key. Direct entries take precedence over those of merge keys (``<<``)."""
        if id(node) not in self.pairs:
            lines: dict[str, int] = {}
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == MERGE:
                    continue
                line = key_node.start_mark.line + 1
                if key_node.value in lines:
                    message = f"duplicate key; it is also on line {lines[key_node.value]}; remove one of them"
                    self.problems.append(Problem(self.origin(line), (*path, key_node.value), message))
                lines.setdefault(key_node.value, line)
            merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
            direct: dict[str, tuple[yaml.Node, yaml.Node]] = {}
            for key_node, value_node in node.value:
                if key_node.tag != MERGE:
                    direct[self._key(key_node)] = (key_node, value_node)
                    continue
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    for key, pair in self._merge_source(source, path).items():
                        merged.setdefault(key, pair)  # the first of several sources wins
            self.pairs[id(node)] = merged | direct
        return self.pairs[id(node)]

    def _merge_source(self, node: yaml.Node, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise _refusal("a merge key (<<) takes a mapping or a list of mappings", node)
        self._enter(node)
        pairs = self._merged_pairs(node, path)
        self.open.discard(id(node))
        self._count(len(pairs), node)
        return pairs

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise _refusal("a key must be a word", node)
        if problem := unusable_value(node.value):
            raise _refusal(problem, node)
        return node.value


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


FULL_WIDTH_COLON = re.compile(r"\s*(- +)*[\w.\-]+\s*\uff1a")
MISSING_SPACE = re.compile(r"""\s*(- +)*(?P<key>[A-Za-z_][\w.\-]*):(?P<value>[\w'"\[{.\-][^:]*)$""")
TAB = r"character '\t'"
ADVICE = {
    TAB: "indent with spaces, not with tabs",
    "found undefined alias": "an anchor &name stands before its alias *name, in the same file",
    "expected <block end>": "keys of one section begin in the same column",
    "could not find expected ':'": "write key: value, with a space after the colon",
}


def syntax_advice(lines: Sequence[str], noticed: int, reason: str) -> str:
    """Return ``"; …"``: what to write, by the line (from 0 on) that the parser stopped at and the one before; else empty."""
    for number in () if TAB in reason else (noticed, *_written_before(lines, noticed)):
        if number < len(lines) and (advice := line_advice(lines[number].partition(" #")[0].rstrip())):
            return f"; line {number + 1}: {advice}"
    return next((f"; {advice}" for part, advice in ADVICE.items() if part in reason), "")


def _written_before(lines: Sequence[str], noticed: int) -> list[int]:
    """Return the nearest line before that is neither empty nor a comment."""
    for number in range(min(noticed, len(lines)) - 1, -1, -1):
        if lines[number].strip() and not lines[number].lstrip().startswith("#"):
            return [number]
    return []


def line_advice(line: str) -> str:
    """Return what to write in a line whose key has no colon that YAML knows; empty where it has one."""
    if FULL_WIDTH_COLON.match(line):
        return "the colon is a full-width one; write ': '"
    if missing := MISSING_SPACE.match(line):
        return f"space missing after the colon; write {missing['key']}: {missing['value']}"
    return ""
