"""Which known family an unknown ``config.json`` is nearest to, and what of the file that family would not take."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.config.quantization import KEY
from mindllm.errors import shortened
from mindllm.families.family import Content, Family, Required

ABOUT_FILES = re.compile(
    r"_.*|.*_token_id|architectures|auto_map|model_type|torch_dtype|dtype|transformers_version|use_cache|pretraining_tp|"
    r"attn_implementation|output_\w+|return_dict|id2label|label2id|task_specific_params|tokenizer_class|initializer_range|"
    r"\w*_?(dropout|pdrop)(_p|_prob)?"
)
"""Keys that say nothing of what is computed: of files, of tokens, of training."""
SHOWN = 8  # keys of each kind
USUAL_ABSENT = 2  # keys with defaults that files of a family often leave out
FEWEST = 4  # keys of a model that a family must read, or it is no near one


@dataclass(frozen=True)
class Fit:
    """What a family makes of a file.

    Attributes:
        read: keys it reads.
        unread: keys it does not know.
        missing: keys it needs.
        refused: keys whose value it does not compute.
        absent: keys its own files have.
    """

    family: Family
    read: frozenset[str]
    unread: tuple[str, ...]
    missing: tuple[str, ...]
    refused: tuple[str, ...]
    absent: int

    @property
    def distance(self) -> float:
        """How many keys are in the way; of those that are absent some always are."""
        return len(self.unread) + 2 * len(self.refused) + max(0, self.absent - USUAL_ABSENT) / 2


class _Watched(dict[str, Any]):
    """A dictionary that remembers which of its keys were asked for."""

    def __init__(self, content: Content) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def fit_of(family: Family, path: Path, content: Content) -> Fit:
    """Return what ``family`` makes of ``content``, which is of another ``model_type``."""
    needed = [theirs for theirs, default in family.keys.values() if isinstance(default, Required)]
    known = (
        {theirs for theirs, _ in family.keys.values()}
        | {*family.only, *family.written, KEY}
        | _read(family, path, content)
    )
    told = [
        key for key, value in content.items() if value not in (None, False, [], {}) and not ABOUT_FILES.fullmatch(key)
    ]
    refused = [
        key for key, allowed in family.only.items() if content.get(key) is not None and content[key] not in allowed
    ]
    return Fit(
        family,
        frozenset(key for key in told if key in known),
        tuple(key for key in told if key not in known),
        tuple(dict.fromkeys(key for key in needed if content.get(key) is None)),
        tuple(refused),
        len({theirs for theirs, _ in family.keys.values() if theirs not in content}),
    )


def nearest_family(families: Iterable[Family], path: Path, content: Content) -> str:
    """Return a sentence on the family that is nearest, and what differs; empty where none is near."""
    fits = [fit_of(family, path, content) for family in families]
    near = [fit for fit in fits if len(fit.read) >= FEWEST and not fit.missing]
    if not near:
        return ""
    kind = str(content.get("model_type"))
    best = min(near, key=lambda fit: (fit.distance, -_likeness(kind, fit.family), -len(fit.read)))
    differing = "; ".join(_differences(best, content))
    if differing:
        return f"nearest is {best.family.name}, which {differing}"
    return f"nearest is {best.family.name}, which knows every key of this file, though it may compute something else"


def _read(family: Family, path: Path, content: Content) -> set[str]:
    """The keys that a family's own function looks at; one that stumbles over this file has looked at some."""
    watched = _Watched(content)
    try:
        family.read(path, watched)
    except Exception:
        return watched.asked
    return watched.asked


def _likeness(kind: str, family: Family) -> float:
    names = (family.name, *family.aliases)
    return max(difflib.SequenceMatcher(None, kind.lower(), name.lower()).ratio() for name in names)


def _differences(fit: Fit, content: Content) -> Iterator[str]:
    if fit.unread:
        yield f"does not know {_named(fit.unread, content)}"
    if fit.refused:
        yield f"does not compute {_named(fit.refused, content)}"


def _named(keys: tuple[str, ...], content: Content) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(f"{shortened(key)} {shortened(content[key], 30)}" for key in keys[:SHOWN]) + more
