"""Names of weights in two conventions, as one table of templates; the inverse is generated from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mindllm.errors import UserError, nearest

LAYER = "{layer}"


@dataclass(frozen=True)
class WeightNames:
    """``table`` maps our names to those of ``convention``; ``{layer}`` stands for the index of a decoder layer in both."""

    convention: str
    table: Mapping[str, str]

    def theirs(self, ours: str) -> str:
        """Translates one of our names.

        Raises:
            UserError: no template fits the name.
        """
        return _translate(ours, self.table.items(), "mindllm")

    def ours(self, theirs: str) -> str:
        """Translates a name of the other convention; errors as :meth:`theirs`."""
        return _translate(theirs, ((there, here) for here, there in self.table.items()), self.convention)


def _translate(name: str, templates: Iterable[tuple[str, str]], convention: str) -> str:
    known = []
    layer = (re.findall(r"\d+", name) or ["0"])[0]
    for source, target in templates:
        known.append(source.replace(LAYER, layer))
        if known[-1] == name:
            return target.replace(LAYER, layer)
    raise UserError(f"unknown weight {name} (names of {convention}){nearest(name, known)}")
