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
    """A tensor of theirs and what it holds of ours.

    Attributes:
        by_head: rows go by key head: its queries, the key, the value; then those of the next one.
        transposed: a matrix of theirs is ``[in, out]``.
        expert: which slice of ours it is; None where it is no expert's.
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
        weights: in the order of the layers.
        neighbours: rotary positions turn channels ``2i`` and ``2i + 1`` of a head instead of ``i`` and ``i + rotary_dim / 2``.
        prefix: what names in files may begin with or not.
        computed: endings of tensors that files hold and every model computes.
        fused: tensors with all experts in which files may hold them instead.
        aliases: other names of theirs, to the one in ``weights``.
        further_layers: files may hold layers behind the last one, which are not read.
        copies: what layers that predict ahead have in files and share here, their name to ours.
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
        """Our templates of names to theirs."""
        return {ours: weight.theirs for weight in self.weights for ours in weight.ours}

    @property
    def projections(self) -> dict[str, tuple[str, ...]]:
        """Our projections below a layer, by what the files call them: several where they are one matrix there."""
        found = {}
        for weight in self.weights:
            if weight.theirs.endswith(WEIGHT) and all(ours.startswith(OUR_LAYER) for ours in weight.ours):
                theirs = weight.theirs.partition(f"{LAYER}.")[2].removesuffix(WEIGHT)
                found[theirs] = tuple(ours.removeprefix(f"{OUR_LAYER}.").removesuffix(WEIGHT) for ours in weight.ours)
        return found

    def theirs(self, ours: str) -> str:
        """The tensor that holds one of our weights.

        Raises:
            UserError: no template fits the name.
        """
        return _translate(ours, self.table.items(), "mindllm")

    def ours(self, theirs: str) -> str:
        """The weight of ours that a tensor holds, the first of several; errors as :meth:`theirs`."""
        pairs = ((weight.theirs, weight.ours[0]) for weight in self.weights)
        return _translate(theirs, pairs, "Hugging Face")

    def of(self, shapes: Shapes) -> tuple[Weight, ...]:
        """The entries of a model that has these weights, with the layers' numbers in their names, in the order of ``shapes``."""
        by_name = {ours: weight for weight in self.weights for ours in weight.ours}
        found: dict[str, Weight] = {}
        for name in shapes:
            layer = (re.findall(r"(?<=\.)\d+(?=\.)", name) or [""])[0]
            template = name.replace(f".{layer}.", f".{LAYER}.", 1) if layer else name
            if template not in by_name:
                raise UserError(f"unknown weight {name} (names of mindllm){nearest(template, by_name)}")
            weight = by_name[template]
            ours = tuple(ours.replace(LAYER, layer) for ours in weight.ours)
            theirs = weight.theirs.replace(LAYER, layer)
            if EXPERT in theirs:
                for expert in range(shapes[name][0]):
                    of_expert = theirs.replace(EXPERT, str(expert))
                    found[of_expert] = Weight(of_expert, ours, expert=expert)
                continue
            found.setdefault(theirs, Weight(theirs, ours, weight.by_head, weight.transposed))
        return tuple(found.values())


def renamed(names: Mapping[str, str]) -> tuple[Weight, ...]:
    """Entries of one weight each, ours to theirs."""
    return tuple(Weight(theirs, (ours,)) for ours, theirs in names.items())


def in_layers(below_ours: str, below_theirs: str, weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Entries of a decoder layer, below the paths of ``{layer}`` on both sides."""
    return tuple(
        Weight(
            f"{below_theirs}.{weight.theirs}",
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


def with_biases(theirs: str, ours: tuple[str, ...], by_head: bool = False, transposed: bool = False) -> list[Weight]:
    """A projection's weight and bias."""
    return [
        Weight(f"{theirs}.{kind}", tuple(f"{name}.{kind}" for name in ours), by_head, transposed and kind == "weight")
        for kind in ("weight", "bias")
    ]


def _translate(name: str, templates: Iterable[tuple[str, str]], convention: str) -> str:
    known = []
    layer = (re.findall(r"\d+", name) or ["0"])[0]
    for source, target in templates:
        known.append(source.replace(LAYER, layer))
        if known[-1] == name:
            return target.replace(LAYER, layer)
    raise UserError(f"unknown weight {name} (names of {convention}){nearest(name, known)}")


WEIGHTS_FILE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes, the most that the format's own reader takes


def index_of(file: str) -> str:
    """The name of the index that lists the shards of ``file``."""
    return f"{file}.index.json"


INDEX_FILE = index_of(WEIGHTS_FILE)


def weight_names(directory: Path) -> frozenset[str] | None:
    """Their names; None where there are no safetensors files, or their names cannot be read: whoever reads them says why."""
    try:
        if not (directory / WEIGHTS_FILE).is_file() and (directory / INDEX_FILE).is_file():
            return frozenset(read_json(directory / INDEX_FILE)["weight_map"])
        with open_file(directory / WEIGHTS_FILE) as file:
            length = int.from_bytes(file.read(8), "little")
            return frozenset(parse_json(file.read(length))) if length < LONGEST_HEADER else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
