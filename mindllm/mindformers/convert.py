"""From a document of MindFormers and a command line to a document of ours, with what became of every key."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mindllm.config.reading.document import Document, merge
from mindllm.config.reading.overrides import Overrides, override_document, split_overrides
from mindllm.config.run import RunConfig
from mindllm.errors import UserError, nearest
from mindllm.mindformers.class_defaults import as_left_out, with_class_defaults
from mindllm.mindformers.keys.rules import Outcome
from mindllm.mindformers.reading import Entry, leaves
from mindllm.mindformers.recognise import IGNORED_KEYS, OPTIONS, belongs_to_theirs
from mindllm.mindformers.translate import translate

MEANINGS = ("as_run", "as_written")


@dataclass(frozen=True)
class Conversion:
    """Our ``document`` (its problems are what is refused or unknown), the options that are still to be applied to it, and the
    entries in the order of the file; ``warnings`` say what was taken for something that is not there."""

    document: Document
    overrides: Overrides
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()

    def counts(self) -> dict[Outcome, int]:
        """How many keys came to each outcome; defaults that were written for them are no keys."""
        found = Counter(entry.outcome for entry in self.entries if entry.origin is not None)
        return {outcome: found[outcome] for outcome in Outcome}


def convert(theirs: Document, overrides: Overrides = ()) -> Conversion:
    """Translates ``theirs``, changed by those of ``overrides`` that are about it; raises UserError for a wrong option."""
    options, rest = split_overrides(overrides, lambda key: key.startswith(OPTIONS))
    own, remaining = split_overrides(rest, lambda key: belongs_to_theirs(key, theirs))
    as_written = _ignored_keys(options) == "as_written"
    changed = merge(theirs, override_document(own, theirs, RunConfig))
    _repeat_at_anchors(theirs, changed)
    completed, added = with_class_defaults(changed)
    reading = translate(completed, as_written)
    order = {path: place for place, (path, _) in enumerate(leaves(changed.data))}
    entries = sorted(reading.entries.values(), key=lambda entry: order.get(entry.path, len(order)))
    return Conversion(reading.ours, remaining, tuple(as_left_out(entries, added)), tuple(reading.warnings))


def _repeat_at_anchors(theirs: Document, changed: Document) -> None:
    """Sections that were the same by an anchor are so after an option has changed one of them."""
    for name in ("train_dataset", "eval_dataset"):
        task = theirs.data.get(f"{name}_task")
        if isinstance(task, dict) and task.get("dataset_config") == theirs.data.get(name):
            changed.data[f"{name}_task"] = {**task, "dataset_config": changed.data.get(name)}


def _ignored_keys(options: Overrides) -> str:
    """What keys mean that MindFormers itself ignores: what its runs did, or what is written."""
    chosen = MEANINGS[0]
    for key, value in override_document(options, Document(), RunConfig).data.get("mindformers", {}).items():
        name = f"mindformers.{key}"
        if name != IGNORED_KEYS:
            raise UserError(f"--{name}: unknown option{nearest(name, [IGNORED_KEYS])}")
        if value not in MEANINGS:
            raise UserError(f"--{name}: must be {' or '.join(MEANINGS)} (value {value})")
        chosen = value
    return chosen
