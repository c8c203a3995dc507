"""Python that task YAMLs of others name, found before any of it runs.

The harness resolves ``!function`` while it loads a task, takes metrics it does not know for scripts of the library ``evaluate``,
and reads pickles through the reader ``pandas`` of the library ``datasets``. Its own YAMLs and ours are trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2.sandbox import SandboxedEnvironment

from mindllm.errors import UserError, shortened
from mindllm.outside import LARGEST_YAML, read_bytes

PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in (
        "null",
        "bool",
        "int",
        "float",
        "binary",
        "timestamp",
        "omap",
        "pairs",
        "set",
        "str",
        "seq",
        "map",
        "merge",
        "value",
    )
)
PLAIN_READERS = ("json", "csv", "parquet", "text", "arrow", "xml")  # of the library datasets: they run nothing
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the harness' own: another one might read another thing
CONFIRM = "--confirm_run_unsafe_code"


def refuse_python(names: Iterable[str], index: Mapping[str, Any], trusted: Sequence[Path]) -> None:
    """Raises UserError where one of the tasks ``names``, or what it includes, names Python in a YAML outside of ``trusted``.

    ``index``: the harness' entries by name; a group names its members, what a YAML includes may lie anywhere.
    """
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if (entry := index.get(name)) is None or name in seen:
            continue
        seen.add(name)
        waiting += entry.tags if entry.yaml_path is None else _members(entry.cfg)
        for path in _with_included(entry.yaml_path) if entry.yaml_path is not None else ():
            if any(path.is_relative_to(place) for place in trusted):
                continue
            for line, what in python_in(path):
                raise UserError(
                    f"{path}:{line}: {what}: task {shortened(name)} runs Python that the file names; read that, then "
                    f"give {CONFIRM} to run it, with all rights of this process"
                )


def python_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yields what names Python in a YAML, with its line."""
    for node in _nodes(_composed(path)):
        line = node.start_mark.line + 1
        if node.tag not in PLAIN_TAGS:
            value = f" {shortened(node.value)}" if isinstance(node, yaml.ScalarNode) else ""
            yield line, f"{node.tag.replace('tag:yaml.org,2002:', '!!')}{value}"
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if why := _named_by_key(str(key.value), value):
                    yield key.start_mark.line + 1, why


def sandboxed(environment: Any) -> SandboxedEnvironment:
    """The harness' environment of templates, in which a template does not reach what is behind Python's underscores."""
    safe = SandboxedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    safe.filters.update(environment.filters)
    return safe


def _named_by_key(key: str, value: yaml.Node) -> str:
    """How a key runs Python although its value has no tag that says so; empty where it does not."""
    if value.tag not in PLAIN_TAGS:
        return ""  # that is said of the value itself
    text = value.value if isinstance(value, yaml.ScalarNode) else ""
    if key == "class":
        return f"class: {shortened(text)}"
    if key == "metric" and text not in _known_metrics():
        return f"metric: {shortened(text)} (no metric of the harness: a script)"
    if key == "hf_evaluate" and text.lower() in ("true", "yes", "on"):
        return "hf_evaluate: true (a metric that is a script)"
    if key == "dataset_path" and text in _readers() and text not in PLAIN_READERS:
        return f"dataset_path: {text} (a reader that can run what it reads)"
    return ""


def _composed(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(read_bytes(path, LARGEST_YAML), Loader=LOADER)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a task: {shortened(str(error), 200)}") from None


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Each node once; an alias is its node."""
    waiting, seen = [root] if root is not None else [], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
        if isinstance(node, yaml.MappingNode):
            waiting += [each for pair in reversed(node.value) for each in reversed(pair)]


def _with_included(path: Path) -> Iterator[Path]:
    """A YAML, and all that it includes, as the harness finds them."""
    waiting, seen = [path], set()
    while waiting:
        path = waiting.pop().expanduser().resolve()
        if path in seen:
            continue
        seen.add(path)
        yield path
        root = _composed(path)
        pairs = root.value if isinstance(root, yaml.MappingNode) else []
        for key, value in pairs:
            if key.value == "include":
                named = value.value if isinstance(value, yaml.SequenceNode) else [value]
                waiting += [path.parent / str(each.value) for each in named]


def _members(config: Mapping[str, Any] | None) -> list[str]:
    """Every text in what a group lists: names of tasks and groups among them."""
    waiting, found = [(config or {}).get("task")], []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return found


def _known_metrics() -> Iterable[str]:
    import lm_eval.api.metrics  # noqa: F401  (registers them)
    from lm_eval.api.registry import metric_registry

    return metric_registry


def _readers() -> Iterable[str]:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return _PACKAGED_DATASETS_MODULES
