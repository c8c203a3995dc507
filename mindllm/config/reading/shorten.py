"""Writing a configuration as a short YAML: differences from a base, without the defaults of the schema."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindllm.config.reading.document import KeyPath
from mindllm.config.reading.load import BASE, base_files, load_config, plain, read_document
from mindllm.config.reading.schema import fields_at
from mindllm.config.reading.shipped import NAME, shipped_configs
from mindllm.config.reading.yaml_tree import write_yaml
from mindllm.config.run import RunConfig
from mindllm.errors import UserError
from mindllm.files import atomic_path

NETWORK_KEYS = ("hidden_size", "num_layers", "num_heads", "vocab_size", "intermediate_size")


def short_yaml(config: RunConfig, bases: Iterable[Path], comment: str = "", directory: Path | None = None) -> str:
    """Return the shortest YAML of ``config`` over one of ``bases``, or over none.

    Bases with another network are passed over. Loading the text gives an equal configuration from a file in ``directory``,
    or, without one, from anywhere.
    """
    choices = [(over_base(config, base), base) for base in (None, *bases)]
    difference, base = min((choice for choice in choices if choice[0] is not None), key=_length)
    if base is not None:
        difference = over_base(config, base, resolved=True)
    first_line = _base_line(base, directory) if base else ""
    text = write_yaml(difference) if difference else ""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + first_line + text


def _length(choice: tuple[Any, Path | None]) -> int:
    difference, base = choice
    return (write_yaml(difference).count("\n") if difference else 0) + (base is not None)


def _base_line(base: Path, directory: Path | None) -> str:
    """Return the line that names a base: below ``configs/``, relative to the directory of the file over it, or absolute."""
    path, shipped = base.resolve(), shipped_configs().resolve()
    if path.is_relative_to(shipped):
        name, reason = (Path(NAME) / path.relative_to(shipped)).as_posix(), ""
    else:
        name = relative_name(path, directory) if directory else ""
        reason = "" if name or not directory else "  # absolute: no relative path lasts from here"
    return write_yaml({BASE: name or str(path)}).rstrip("\n") + f"{reason}\n"


def relative_name(base: Path, directory: Path) -> str:
    """Return the path of ``base`` relative to ``directory``, which holds after a directory around both is moved.

    Empty where there is none: only the root is around both, they are on different file systems, or a symbolic link leads to
    another place through one name of the directory than through the other.
    """
    real, absolute = directory.resolve(), directory.absolute()
    around = os.path.commonpath([real, base])
    if around == os.path.sep or real.stat().st_dev != base.stat().st_dev:
        return ""
    for start in (real, absolute):
        name = os.path.relpath(base, start)
        # names are joined as texts when the file is read
        places = [Path(os.path.normpath(place / name)) for place in (real, absolute)]
        if all(place.exists() and place.samefile(base) for place in places):
            return name
    return ""


def source_bases(config: RunConfig) -> list[Path]:
    """Return the base for a changed run: the file it was read from, else the shipped configurations.

    A file with ignored unknown keys cannot be a base, because loading it requires the option that ignores them.
    """
    if config.source and config.source.is_file() and not config.has_ignored_keys:
        return [config.source]
    return sorted(shipped_configs().rglob("*.yaml"))


def write_short(config: RunConfig, path: Path, bases: Iterable[Path], comment: str = "") -> str:
    """Write :func:`short_yaml` to ``path``, whole or not at all, and return it.

    A base that is the file at ``path``, or is based on it, would be lost: what that file is based on is taken instead.

    Raises:
        UserError: the file cannot be written.
    """
    sources = dict.fromkeys(remaining for base in bases for remaining in _remaining_base(base, path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = short_yaml(config, sources, comment, path.parent)
        with atomic_path(path) as written:
            written.write_text(text, encoding="utf-8")
            if load_config(written) != config:
                raise RuntimeError(f"{path}: would not have been the configuration it was written from")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return text


def _remaining_base(base: Path, path: Path) -> list[Path]:
    """Return ``base``, or if writing ``path`` would overwrite it, the base of the file at ``path``."""
    if not path.exists():
        return [base]
    chain = [base, *base_files(base)]
    places = [number for number, file in enumerate(chain) if os.path.realpath(file) == os.path.realpath(path)]
    return chain[places[-1] + 1 :][:1] if places else [base]


def over_base(config: RunConfig, base: Path | None, resolved: bool = False) -> Any:
    """Return the keys of a YAML over ``base`` that gives ``config``, as a tree; None for a base with another network.

    Args:
        config: the configuration to write.
        base: YAML to write the differences from.
        resolved: compare with values in the form of the schema, such as 1 for ``semi_auto_parallel``.
    """
    tree = _without_defaults(plain(config.given()), ())
    if base is None:
        return tree
    document = read_document(base)
    network = document.data.get("model", {}).get("model_config", {})
    if any(key in network and network[key] != getattr(config.model.config, key, None) for key in NETWORK_KEYS):
        return None
    former = _resolved(document.data, base) if resolved else document.data
    return _difference(tree, former, plain(config.model_dump(by_alias=True)))


def _resolved(data: Any, base: Path) -> Any:
    """Return ``data`` with values in the form of the schema, if the base is a complete run."""
    try:
        values = plain(load_config(base).model_dump(by_alias=True))
    except UserError:
        return data
    return _with_values(data, values)


def _with_values(data: Any, values: Any) -> Any:
    if not isinstance(data, dict) or not isinstance(values, dict):
        return data if isinstance(values, dict | list) else values
    return {key: _with_values(value, values[key]) if key in values else value for key, value in data.items()}


def _without_defaults(tree: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """Return ``tree`` without keys that have the default. ``type`` stays because it selects the section."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        inner_path = (*path, key)
        if isinstance(value, dict):
            inner = _without_defaults(value, inner_path)
            if inner:
                result[key] = inner
        elif key == "type" or not any(plain(info.default) == value for info in fields_at(RunConfig, inner_path)):
            result[key] = value
    return result


def _difference(tree: dict[str, Any], base: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of ``tree`` that differ from ``base``, and keys of ``base`` that differ from the ``target``."""
    changed: dict[str, Any] = {}
    for key, value in tree.items():
        former = base.get(key)
        if isinstance(value, dict) and isinstance(former, dict) and _same_kind(value, former, target[key]):
            inner = _difference(value, former, target[key])
            if inner:
                changed[key] = inner
        elif former != value:
            changed[key] = value
    for key, former in base.items():
        if key in tree or key not in target:
            continue
        target_value = target[key]
        if isinstance(former, dict) and isinstance(target_value, dict):
            inner = _difference({}, former, target_value)
            if inner:
                changed[key] = inner
        elif former != target_value:
            changed[key] = target_value
    return changed


def _same_kind(value: dict[str, Any], former: dict[str, Any], target: dict[str, Any]) -> bool:
    kind = target.get("type")
    return value.get("type", kind) == former.get("type", kind)
