"""Writes a configuration as a short YAML: what differs from a base, without what is the schema's default anyway."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindllm.config.reading.document import KeyPath
from mindllm.config.reading.load import BASE, bases_of, load_config, plain, read_document
from mindllm.config.reading.schema import fields_at
from mindllm.config.reading.shipped import NAME, shipped_configs
from mindllm.config.reading.yaml_tree import write_yaml
from mindllm.config.run import RunConfig
from mindllm.errors import UserError
from mindllm.files import atomic_path

SAME_NETWORK = ("hidden_size", "num_layers", "num_heads", "vocab_size", "intermediate_size")


def short_yaml(config: RunConfig, bases: Iterable[Path], comment: str = "") -> str:
    """Return the shortest YAML of ``config`` over one of ``bases``, or over none.

    Bases with another network are passed over. Loading the text gives an equal configuration, in whatever directory it is.
    """
    choices = [(over_base(config, base), base) for base in (None, *bases)]
    difference, base = min((choice for choice in choices if choice[0] is not None), key=_length)
    if base is not None:
        difference = over_base(config, base, resolved=True)
    first_line = f"{BASE}: {lasting_name(base)}\n" if base else ""
    text = write_yaml(difference) if difference else ""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + first_line + text


def _length(choice: tuple[Any, Path | None]) -> int:
    difference, base = choice
    return (write_yaml(difference).count("\n") if difference else 0) + (base is not None)


def lasting_name(base: Path) -> str:
    """Return the name of a base that holds wherever the file over it is moved: below ``configs/``, or absolute."""
    path, shipped = base.resolve(), shipped_configs().resolve()
    return str(Path(NAME) / path.relative_to(shipped)) if path.is_relative_to(shipped) else str(path)


def own_bases(config: RunConfig) -> list[Path]:
    """Return the bases that a changed run is written over: the file it was read from, or where there is none what is shipped."""
    return [config.source] if config.source and config.source.is_file() else sorted(shipped_configs().rglob("*.yaml"))


def write_short(config: RunConfig, path: Path, bases: Iterable[Path], comment: str = "") -> str:
    """Write :func:`short_yaml` to ``path``, whole or not at all, and returns it.

    A base that is the file at ``path``, or is based on it, would be lost: what that file is based on is taken instead.

    Raises:
        UserError: the file cannot be written.
    """
    text = short_yaml(config, dict.fromkeys(kept for base in bases for kept in _kept_base(base, path)), comment)
    try:
        with atomic_path(path) as written:
            written.write_text(text, encoding="utf-8")
            if load_config(written) != config:
                raise RuntimeError(f"{path}: would not have been the configuration it was written from")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return text


def _kept_base(base: Path, path: Path) -> list[Path]:
    """``base``, or where writing ``path`` would change it what is left of it, if anything."""
    if not path.exists():
        return [base]
    chain = [base, *bases_of(base)]
    places = [number for number, one in enumerate(chain) if os.path.realpath(one) == os.path.realpath(path)]
    return chain[places[-1] + 1 :][:1] if places else [base]


def over_base(config: RunConfig, base: Path | None, resolved: bool = False) -> Any:
    """Return what a YAML over ``base`` says to be ``config``, as a tree; None for a base with another network.

    ``resolved``: with the values that the schema makes of those of the base, ``1`` of ``semi_auto_parallel``.
    """
    given = _without_defaults(plain(config.given()), ())
    if base is None:
        return given
    document = read_document(base)
    network = document.data.get("model", {}).get("model_config", {})
    if any(key in network and network[key] != getattr(config.model.config, key, None) for key in SAME_NETWORK):
        return None
    former = _resolved(document.data, base) if resolved else document.data
    return _difference(given, former, plain(config.model_dump(by_alias=True)))


def _resolved(data: Any, base: Path) -> Any:
    """``data`` with the values that the schema makes of them, where the base is a run by itself."""
    try:
        values = plain(load_config(base).model_dump(by_alias=True))
    except UserError:
        return data
    return _values_of(data, values)


def _values_of(data: Any, values: Any) -> Any:
    if not isinstance(data, dict) or not isinstance(values, dict):
        return data if isinstance(values, dict | list) else values
    return {key: _values_of(value, values[key]) if key in values else value for key, value in data.items()}


def _without_defaults(given: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """``given`` without keys that have the schema's default; the type of a section stays, it chooses the section."""
    kept: dict[str, Any] = {}
    for key, value in given.items():
        here = (*path, key)
        if isinstance(value, dict):
            inner = _without_defaults(value, here)
            if inner:
                kept[key] = inner
        elif key == "type" or not any(plain(info.default) == value for info in fields_at(RunConfig, here)):
            kept[key] = value
    return kept


def _difference(given: dict[str, Any], base: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """What ``given`` says otherwise than ``base``, and what ``base`` says that the ``target`` does not have."""
    changed: dict[str, Any] = {}
    for key, value in given.items():
        former = base.get(key)
        if isinstance(value, dict) and isinstance(former, dict) and _same_kind(value, former, target[key]):
            inner = _difference(value, former, target[key])
            if inner:
                changed[key] = inner
        elif former != value:
            changed[key] = value
    for key, former in base.items():
        if key in given or key not in target:
            continue
        wanted = target[key]
        if isinstance(former, dict) and isinstance(wanted, dict):
            inner = _difference({}, former, wanted)
            if inner:
                changed[key] = inner
        elif former != wanted:
            changed[key] = wanted
    return changed


def _same_kind(value: dict[str, Any], former: dict[str, Any], target: dict[str, Any]) -> bool:
    kind = target.get("type")
    return value.get("type", kind) == former.get("type", kind)
