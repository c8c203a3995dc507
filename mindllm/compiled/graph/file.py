"""Keeps compiled graphs in files: a zip of MindIR as the compiler made it, and a JSON and arrays of what MindIR leaves out.

A zip carries a checksum of each member, so damage is noticed; nothing in it is executed when it is read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.compiled.graph.sources import Sources, sources_from_json, sources_to_json
from mindllm.compiled.rank.pool import Pool
from mindllm.errors import UserError
from mindllm.files import atomic_path
from mindllm.outside import LARGEST_GRAPH, open_file, parse_json
from mindllm.parallel.parameter_layout import ParameterLayout

FORMAT, VERSION = "mindllm compiled graph", 3
MIND_IR, FACTS, INITIAL = "rank.mindir", "rank.json", "initial.npz"


def write_graph(
    path: Path,
    rank: int,
    mind_ir: bytes,
    layouts: Mapping[str, ParameterLayout],
    sources: Sources,
    initial: Mapping[str, np.ndarray],
    begins: Mapping[str, tuple[Any, ...]],
) -> None:
    """Write a graph, layouts and beginnings of its parameters and source lines of its operators; whole or absent."""
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "layouts": {name: dataclasses.asdict(layout) for name, layout in layouts.items()},
        "sources": sources_to_json(sources),
        "begins": begins,
    }
    with atomic_path(path) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FACTS, json.dumps(facts))
        archive.writestr(MIND_IR, mind_ir)
        archive.writestr(INITIAL, _packed(initial))


def save(graph: CompiledGraph, path: Path) -> None:
    """Write a graph to ``path``."""
    parameters = graph.parameters.values()
    layouts = {parameter.name: parameter.layout for parameter in parameters if parameter.layout}
    initial = {parameter.name: parameter.initial for parameter in parameters if parameter.initial is not None}
    begins = {parameter.name: parameter.begins for parameter in parameters if parameter.begins is not None}
    write_graph(path, graph.rank, graph.mind_ir, layouts, graph.sources, initial, begins)


def load(path: Path, pool: Pool | None = None) -> CompiledGraph:
    """Read what :func:`save` wrote. Graphs that are only executed and inspected are read with one ``pool`` for all ranks.

    Raises:
        UserError: the file is missing, damaged or something else.
    """
    try:
        with open_file(path) as opened, zipfile.ZipFile(opened) as archive:
            facts = parse_json(_part(archive, FACTS))
            _require_format(path, facts)
            mind_ir = _part(archive, MIND_IR)
            initial = _unpacked(_part(archive, INITIAL))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, NotImplementedError) as error:
        raise UserError(f"{path}: damaged, or not a compiled graph ({error})") from None
    try:
        layouts = {name: ParameterLayout.from_json(layout) for name, layout in facts["layouts"].items()}
        begins = {name: _as_tuple(value) for name, value in facts["begins"].items()}
        sources = sources_from_json(facts["sources"])
        graph = parse_mind_ir(mind_ir, int(facts["rank"]), layouts, sources, initial, pool)
        parameters = {one.name: replace(one, begins=begins.get(one.name)) for one in graph.parameters.values()}
        return replace(graph, parameters=parameters)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a compiled graph of this version ({error})") from None


def _part(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a decompressed part of an archive; raise ValueError if it is larger than any graph."""
    with archive.open(name) as part:
        content = part.read(LARGEST_GRAPH + 1)
    if len(content) > LARGEST_GRAPH:
        raise ValueError(f"{name} has more than {LARGEST_GRAPH:,} bytes once decompressed")
    return content


def _as_tuple(value: Any) -> Any:
    """List of JSON as the tuples that they were."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _unpacked(data: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _require_format(path: Path, facts: Any) -> None:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise UserError(f"{path}: not a compiled graph")
    if facts.get("version") != VERSION:
        raise UserError(f"{path}: has version {facts.get('version')}, this release reads {VERSION}; compile it again")
