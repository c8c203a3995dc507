"""Where each of our weights is in the files of a family: one declarative table, read in both directions.

An entry names a tensor of theirs and the weights of ours in it: one (a rename), or several whose rows follow each other, whole
(``[q; k; v]``, ``[gate; up]``) or head by head. In both names ``{layer}`` stands for the index of a decoder layer; in theirs
``{expert}`` stands for that of an expert: each of theirs is a slice of ours, whose first dimension is the experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindllm.architecture.adapters import WEIGHT
from mindllm.architecture.parts import Shapes
from mindllm.errors import UserError, nearest
from mindllm.outside import open_file, parse_json, read_json

LAYER, EXPERT = "{layer}", "{expert}"


@dataclass(frozen=True)
class Weight:
    """A tensor in files and the weights of mindllm in it.

    Attributes:
        theirs: its name in files.
        ours: the weights, in order of their rows.
        by_head: rows are grouped by key head: its queries, its key, its value.
        transposed: the matrix in files is ``[in, out]``.
        expert: slice of the weight that it is; None if it is not an expert.
    """

    theirs: str
    ours: tuple[str, ...]
    by_head: bool = False
    transposed: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class FusedExperts:
    """A tensor ``[experts, rows, in]`` in which newer files hold what others hold expert by expert: ``parts`` name the tensors of
    an expert whose rows follow each other in it.
    """

    theirs: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class WeightTable:
    """The tensors of a family.

    Attributes:
        weights: entries in the order of layers.
        neighbours: rotary positions rotate channels ``2i`` and ``2i + 1`` of a head instead of ``i`` and ``i + rotary_dim / 2``.
        prefix: optional prefix of names in files.
        computed: suffixes of tensors in files that every model computes.
        fused: tensors of all experts that files may have instead.
        aliases: other names in files, and the name in ``weights``.
        further_layers: files may have layers after the last one, which are not read.
        copies: tensors of multi-token prediction layers that are shared in mindllm: name in files, name in mindllm.
    """

    weights: tuple[Weight, ...]
    neighbours: bool = False
    prefix: str = ""
    computed: tuple[str, ...] = ()
    fused: tuple[FusedExperts, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    further_layers: bool = False
    copies: tuple[tuple[str, str], ...] = ()

    @property
    def table(self) -> Mapping[str, str]:
        """Return the templates of names in mindllm and in files."""
        return {ours: weight.theirs for weight in self.weights for ours in weight.ours}

    @property
    def projections(self) -> dict[str, tuple[str, ...]]:
        """Return projections of a layer by their name in files; several projections may be one matrix there."""
        projections_by_name = {}
        for weight in self.weights:
            if weight.theirs.endswith(WEIGHT) and all(ours.startswith(OUR_LAYER) for ours in weight.ours):
                tensor = weight.theirs.partition(f"{LAYER}.")[2].removesuffix(WEIGHT)
                projections_by_name[tensor] = tuple(
                    ours.removeprefix(f"{OUR_LAYER}.").removesuffix(WEIGHT) for ours in weight.ours
                )
        return projections_by_name

    def theirs(self, ours: str) -> str:
        """Return the tensor that has one of our weights.

        Raises:
            UserError: no template fits the name.
        """
        return _translate(ours, self.table.items(), "mindllm")

    def ours(self, theirs: str) -> str:
        """Return the first weight in a tensor; errors as in :meth:`theirs`."""
        pairs = ((weight.theirs, weight.ours[0]) for weight in self.weights)
        return _translate(theirs, pairs, "Hugging Face")

    def of(self, shapes: Shapes) -> tuple[Weight, ...]:
        """Return the entries of a model with these weights, with layer numbers, in the order of ``shapes``."""
        by_name = {ours: weight for weight in self.weights for ours in weight.ours}
        entries: dict[str, Weight] = {}
        for name in shapes:
            layer = (re.findall(r"(?<=\.)\d+(?=\.)", name) or [""])[0]
            template = name.replace(f".{layer}.", f".{LAYER}.", 1) if layer else name
            if template not in by_name:
                raise UserError(f"unknown weight {name} (names of mindllm){nearest(template, by_name)}")
            weight = by_name[template]
            ours = tuple(ours.replace(LAYER, layer) for ours in weight.ours)
            tensor = weight.theirs.replace(LAYER, layer)
            if EXPERT in tensor:
                for expert in range(shapes[name][0]):
                    expert_tensor = tensor.replace(EXPERT, str(expert))
                    entries[expert_tensor] = Weight(expert_tensor, ours, expert=expert)
                continue
            entries.setdefault(tensor, Weight(tensor, ours, weight.by_head, weight.transposed))
        return tuple(entries.values())


def renamed(names: Mapping[str, str]) -> tuple[Weight, ...]:
    """Return entries that rename one weight each."""
    return tuple(Weight(tensor, (ours,)) for ours, tensor in names.items())


def in_layers(below_ours: str, below_files: str, weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Return the entries of a decoder layer, with the paths of ``{layer}`` on both sides."""
    return tuple(
        Weight(
            f"{below_files}.{weight.theirs}",
            tuple(f"{below_ours}.{ours}" for ours in weight.ours),
            weight.by_head,
            weight.transposed,
        )
        for weight in weights
    )


OUR_LAYER = f"model.layers.{LAYER}"
EMBEDDING, POSITIONS, HEAD = (
    "model.tok_embeddings.embedding_weight",
    "model.position_embeddings.embedding_weight",
    "lm_head.weight",
)
QUERY_KEY_VALUE = tuple(f"attention.{name}" for name in ("wq", "wk", "wv"))


def with_biases(tensor: str, ours: tuple[str, ...], by_head: bool = False, transposed: bool = False) -> list[Weight]:
    """Return the entries of a projection's weight and bias."""
    return [
        Weight(f"{tensor}.{kind}", tuple(f"{name}.{kind}" for name in ours), by_head, transposed and kind == "weight")
        for kind in ("weight", "bias")
    ]


def _translate(name: str, templates: Iterable[tuple[str, str]], convention: str) -> str:
    names = []
    layer = (re.findall(r"\d+", name) or ["0"])[0]
    for source, target in templates:
        names.append(source.replace(LAYER, layer))
        if names[-1] == name:
            return target.replace(LAYER, layer)
    raise UserError(f"unknown weight {name} (names of {convention}){nearest(name, names)}")


WEIGHTS_FILE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes, the most that the format's own reader takes


def index_of(file: str) -> str:
    """Return the name of the index that lists the shards of ``file``."""
    return f"{file}.index.json"


INDEX_FILE = index_of(WEIGHTS_FILE)


def weight_names(directory: Path) -> frozenset[str] | None:
    """Return the tensor names; None without safetensors files, or if they cannot be read: their reader reports why."""
    try:
        if not (directory / WEIGHTS_FILE).is_file() and (directory / INDEX_FILE).is_file():
            return frozenset(read_json(directory / INDEX_FILE)["weight_map"])
        with open_file(directory / WEIGHTS_FILE) as file:
            length = int.from_bytes(file.read(8), "little")
            return frozenset(parse_json(file.read(length))) if length < LONGEST_HEADER else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
