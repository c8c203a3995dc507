"""Places by the names that people use: the cell of an operator, and whether an answer names it."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

SCOPE = re.compile(r" at (\S+)")
PARAMETER = re.compile(r"\b(?:model|lm_head|tok_embeddings|norm_out)\.[\w.]+")
SURROUNDS = ("network", "CausalLM")


def cell_of(scope: str) -> str:
    """``model.layers.1.attention.wo`` of MindSpore's scope, whether it is of the forward or of the backward pass.

    Directly in the model or around it, the class of that cell.
    """
    if "/" not in scope:
        return scope  # of a cell already
    levels = [level.rsplit("-", 1) for level in scope.removeprefix("Gradients/").split("/")[1:-1]]
    kept = [level for level in levels if not level[0].startswith("Grad_")]
    return ".".join(name for name, *_ in kept if name not in SURROUNDS) or "".join(kept[-1][1:] if kept else "")


def named(answer: str) -> list[str]:
    """Cells and parameters that an answer names, the operator that differs first."""
    cells = [cell_of(scope) for scope in SCOPE.findall(answer)]
    parameters = [found.removesuffix(".") for found in PARAMETER.findall(answer)]
    return [*filter(None, cells), *parameters]


def is_near(found: str, wanted: str) -> bool:
    """Whether two names are of one cell, of a cell and one directly inside it, or of a cell and a weight of it."""
    found, wanted = (re.sub(r"^(model\.)?|\.(weight|bias|embedding_weight)$", "", name) for name in (found, wanted))
    if found == wanted:
        return True
    longer, shorter = sorted((found, wanted), key=len, reverse=True)
    return bool(shorter) and longer.startswith(shorter + ".") and "." not in longer[len(shorter) + 1 :]


def locates(answer: str, places: tuple[str, ...], between: Sequence[Set[str]] = ()) -> bool:
    """Whether an answer names one of the ``places`` that are right: cells, parameters, or the scope of the very operator.

    ``between``: scopes before and behind an operator that is missing; to name one of each is right as well.
    Where an input of the step stands on one side, the other is enough.
    """
    scopes, said = {scope for scope in places if "/" in scope}, set(SCOPE.findall(answer))
    if scopes & said or (any(between) and all(side & said for side in between if side)):
        return True
    return any(is_near(found, wanted) for found in named(answer) for wanted in places if wanted not in scopes)
