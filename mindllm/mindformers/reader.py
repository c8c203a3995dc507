"""The reader of MindFormers' YAMLs, with an account of every key. :data:`mindllm.config.reading.foreign.READERS` names it.

Keys that the YAML of an mcore network omits get the defaults of its configuration class in MindFormers 1.6 to 2.1
(``configuration_deepseek_v3.py``, ``configuration_qwen3.py``, …), unless the YAML names a Hugging Face directory.

Public YAMLs have keys that MindFormers does not read: a configuration class keeps unknown keys as attributes that no network
uses. They are ignored here as well. The head of a legacy Llama is always ``hidden_size / num_heads`` wide, without dropout.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mindllm.config.reading.document import (
    Document,
    KeyPath,
    Problem,
    at,
    closest_origin,
    dotted,
    leaves,
    merge,
    path_of,
)
from mindllm.config.reading.foreign import FOREIGN_KEY_COUNT
from mindllm.config.reading.overrides import Overrides, ignores_unknown, override_document, split_overrides
from mindllm.config.reading.schema import has_key
from mindllm.config.run import RunConfig
from mindllm.errors import MOST_SHOWN, UserError, nearest
from mindllm.mindformers.architecture import translate_architecture
from mindllm.mindformers.directory import read_directory
from mindllm.mindformers.experts import (
    EXPERT_PARALLEL,
    EXPERT_TENSOR,
    GROUPS,
    MODEL,
    MTP_KEYS,
    SCORES,
    SHARED,
    SYNONYMS,
)
from mindllm.mindformers.mesh import translate_mesh, with_replicas
from mindllm.mindformers.model_keys import MODEL_KEYS
from mindllm.mindformers.pynative import (
    PYNATIVE,
    as_written,
    is_pynative,
    keep_masters,
    problems_as_written,
    static_form,
)
from mindllm.mindformers.reading import (
    AS_WRITTEN,
    LIST_ENTRY,
    Entry,
    Outcome,
    Reading,
    Rule,
    Table,
    is_section,
    pattern_of,
    places,
    rule_for,
    shown,
    siblings,
)
from mindllm.mindformers.recomputation import (
    place_mtp_layers,
    translate_recomputation,
    translate_row_parts,
    translate_swap,
)
from mindllm.mindformers.session import PARALLEL, RUN, translate_monitor, translate_session
from mindllm.mindformers.text import DATA, translate_text
from mindllm.mindformers.update import UPDATE, is_of_watcher, translate_update
from mindllm.shorthands import IGNORE_UNKNOWN_KEYS

UNREAD = {  # class of the configuration: its keys
    "LlamaConfig": ("kv_channels", "rotary_emb_base", "rotary_pct", "emb_dropout_prob"),
    "ChatGLM2Config": ("no_recompute_layers",),
}


def drop_unread(reading: Reading) -> None:
    """Mark keys that MindFormers does not read, before other translations; ``as_written`` applies them instead."""
    if reading.as_written:
        return
    kind = reading.word(f"{MODEL}.type")
    for name in UNREAD.get(kind, ()):
        key = f"{MODEL}.{name}"
        if reading.has(key):
            reading.idle(key, f"{kind} of MindFormers does not read it; {AS_WRITTEN} takes it at its word")


KEYS: Table = {
    **RUN,
    **PYNATIVE,
    **PARALLEL,
    **UPDATE,
    **DATA,
    **{
        key: replace(rule, target=f"model.model_config.{rule.target}")
        if rule.target and "." not in rule.target
        else rule
        for key, rule in MODEL_KEYS.items()  # targets are written without the section
    },
}
"""Every key of MindFormers that is known, dotted, and what becomes of it."""


def replacement(path: KeyPath) -> str:
    """Return what to write instead of a key of MindFormers; empty for keys that MindFormers does not have."""
    rule = rule_for(KEYS, path)
    if rule is None:
        return ""
    if rule.target:
        return f"write {rule.target}"
    if rule.outcome is Outcome.WITHOUT_EFFECT:
        return f"remove it: {rule.reason}"
    return f"it is not part of mindllm: {rule.reason}" if rule.reason else ""


__all__ = ["Conversion", "convert", "is_mindformers", "recognizes", "replacement", "section_keys"]

SHARED_KEYS = (EXPERT_PARALLEL, EXPERT_TENSOR)
"""Keys of both programs that decide which other keys of MindFormers are supported."""
OPTIONS = "mindformers."
IGNORED_KEYS = "mindformers.ignored_keys"
SECTION_ADVICE = "a section of MindFormers; `mindllm convert` reports what becomes of its keys"

COMMON = {"initializer_range": 0.02, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
QWEN = {**COMMON, "vocab_size": 151936, "num_attention_heads": 32, "max_position_embeddings": 32768}
DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
}
DEFAULTS: dict[str, dict[str, Any]] = {  # by ``model_type``, in their names
    "deepseek_v3": {
        **COMMON,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        **DEEPSEEK_EXPERTS,
    },
    "qwen3": {
        **QWEN,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "qwen3_moe": {
        **QWEN,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
ALIASES = (*SYNONYMS.values(), *GROUPS.values(), SHARED, SCORES, tuple(f"{MODEL}.{name}" for name in MTP_KEYS))
NONE = "None"  # as Python has nothing
KEYS_WITH_NONE = ("extend_method", "mode", "pre_seq_len")  # keys of theirs that have it as a word
REASON = "left out: the default of MindFormers' class"
STRATEGY = ("parallel", "dataset_strategy")
MEANINGS = ("as_run", "as_written")


def is_mindformers(document: Document) -> bool:
    """Return True if ``document`` has several keys that only MindFormers has. A YAML with a ``base`` is ours."""
    if "base" in document.data:
        return False
    count = 0
    for path, _ in leaves(document.data):
        count += rule_for(KEYS, path) is not None and not has_key(RunConfig, path)
        if count >= FOREIGN_KEY_COUNT:
            return True
    return False


recognizes = is_mindformers


def section_keys(path: KeyPath) -> dict[str, str]:
    """Return the keys that MindFormers has in the section at ``path``, each with what to write instead in our YAML."""
    is_list = any(key.startswith(f"{dotted(path)}.{LIST_ENTRY}.") for key in KEYS)
    section = (*path, 0) if is_list else path
    return {name: replacement((*section, name)) or SECTION_ADVICE for name in siblings(KEYS, (*section, ""))}


def changes_source(key: str, document: Document) -> bool:
    """Return True if an override of ``key`` changes the YAML of MindFormers before it is translated.

    That is a key that the YAML has, a key that only MindFormers has, and a key that decides how others are translated.
    """
    path = path_of(key)
    if rule_for(KEYS, path) is None:
        return False
    is_written = any(inner[: len(path)] == path for inner, _ in leaves(document.data))
    return is_written or not has_key(RunConfig, path) or key in SHARED_KEYS


def with_class_defaults(source: Document) -> tuple[Document, frozenset[str]]:
    """Return the document with the defaults of its configuration class, and the added keys."""
    model = source.data.get("model")
    if not isinstance(model, dict):
        return source, frozenset()
    keys = model.get("model_config")
    if not isinstance(keys, dict) or model.get("arch") or source.data.get("pretrained_model_dir"):
        return source, frozenset()
    kind = keys.get("model_type")
    written = {_canonical_name(f"{MODEL}.{key}") for key, value in keys.items() if value is not None}
    added = {
        key: value
        for key, value in DEFAULTS.get(kind if isinstance(kind, str) else "", {}).items()
        if _canonical_name(f"{MODEL}.{key}") not in written
    }
    completed = merge(source, Document({"model": {"model_config": added}})) if added else source
    return completed, frozenset(f"{MODEL}.{key}" for key in added)


def mark_omitted(entries: list[Entry], added: frozenset[str]) -> list[Entry]:
    """Return the entries, with added keys as omitted ones; added keys without effect have no entry."""
    result = []
    for entry in entries:
        if entry.key not in added:
            result.append(entry)
        elif entry.outcome is not Outcome.WITHOUT_EFFECT:
            becomes = entry.becomes or f"{entry.key}: {shown(entry.value)}"
            outcome = Outcome.TRANSLATED if entry.outcome is Outcome.USED else entry.outcome
            result.append(replace(entry, value=None, outcome=outcome, becomes=becomes, reason=REASON, origin=None))
    return result


def _canonical_name(key: str) -> str:
    """Return one name for all synonyms of a key."""
    for names in ALIASES:
        if key in names:
            return names[0]
    rule = rule_for(KEYS, path_of(key))
    return rule.target if rule is not None and rule.target else key


@dataclass(frozen=True)
class Conversion:
    """A translated YAML.

    Attributes:
        document: keys of mindllm, with problems for refused and unknown keys.
        overrides: options that are still to be applied to the document.
        entries: outcome of every key, in the order of the file.
        warnings: assumptions about missing files.
        has_ignored_keys: whether unknown keys were ignored.
    """

    document: Document
    overrides: Overrides
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()
    has_ignored_keys: bool = False

    def counts(self) -> dict[Outcome, int]:
        """Return the number of keys per outcome. Added defaults do not count."""
        counter = Counter(entry.outcome for entry in self.entries if entry.origin is not None)
        return {outcome: counter[outcome] for outcome in Outcome}

    def source_values(self) -> dict[str, Any]:
        """Return the keys that the YAML has with their values."""
        return {entry.key: entry.value for entry in self.entries if entry.origin is not None}

    def summary(self, name: object) -> str:
        """Return a line about the file ``name``: how many keys came to each outcome."""
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in self.counts().items() if count)
        return f"{name}: MindFormers YAML ({counts}); for every key: mindllm convert {name}"


def convert(source: Document, overrides: Overrides = ()) -> Conversion:
    """Translate ``theirs``, changed by those of ``overrides`` that are about it; raise UserError for a wrong option."""
    options, rest = split_overrides(overrides, lambda key: key.startswith(OPTIONS))
    source_overrides, remaining = split_overrides(rest, lambda key: changes_source(key, source))
    meaning = _ignored_keys(options) == "as_written"
    changed = merge(source, override_document(source_overrides, source, RunConfig))
    # sections shared by an anchor stay equal if an option changes one of them
    for name in ("train_dataset", "eval_dataset"):
        task = source.data.get(f"{name}_task")
        if isinstance(task, dict) and task.get("dataset_config") == source.data.get(name):
            changed.data[f"{name}_task"] = {**task, "dataset_config": changed.data.get(name)}
    adapted = _adapt_dataset_strategy(source, changed)
    # authors write None for null, which YAML reads as text
    data, named = copy.deepcopy(changed.data), []
    for path, value in leaves(changed.data):
        if value == NONE and path[-1] not in KEYS_WITH_NONE:
            at(data, path[:-1])[path[-1]] = None
            named.append(dotted(path))
    messages = [f"None is a text in YAML, and read as null here: {', '.join(named)}"] if named else []
    changed, null_warnings = (replace(changed, data=data) if named else changed), messages
    static = static_form(changed) if is_pynative(changed.data) else None
    completed, added = with_class_defaults(static.document if static else changed)
    reading = translate(completed, meaning, ignores_unknown(overrides))
    if static:
        keep_masters(reading)
    entries = mark_omitted([*reading.entries.values()], added | (static.added if static else set()))
    if static:
        entries = [*as_written(static, changed, entries)]
        refused = [entry for entry in static.entries if entry.outcome is Outcome.REFUSED]
        problems = [Problem(entry.origin, entry.path, entry.reason) for entry in refused]
        reading.ours.problems = [*problems, *problems_as_written(static, reading.ours.problems)]
    order = {path: place for place, (path, _) in enumerate(leaves(changed.data))}
    entries.sort(key=lambda entry: order.get(entry.path, len(order)))
    return Conversion(
        reading.ours, remaining, tuple(entries), (*null_warnings, *adapted, *reading.warnings), reading.has_ignored_keys
    )


def _adapt_dataset_strategy(source: Document, changed: Document) -> list[str]:
    """Split the columns of a batch over a ``data_parallel`` that an option changed. Return a line about it."""
    rows, size = at(changed.data, STRATEGY), ("parallel_config", "data_parallel")
    before, after = at(source.data, size) or 1, at(changed.data, size) or 1
    new = with_replicas(rows, after)
    follows = rows == at(source.data, STRATEGY) and rows == with_replicas(rows, before)
    if rows is None or before == after or not follows or at(changed.data, ("parallel", "full_batch")) is not False:
        return []
    changed.data["parallel"] = {**changed.data["parallel"], STRATEGY[-1]: new}
    return [f"{dotted(STRATEGY)} {shown(rows)} is read as {shown(new)}, because data_parallel is {after} by an option"]


def _ignored_keys(options: Overrides) -> str:
    """Return how to treat keys that MindFormers ignores: as its runs did, or as written."""
    chosen = MEANINGS[0]
    for key, value in override_document(options, Document(), RunConfig).data.get("mindformers", {}).items():
        name = f"mindformers.{key}"
        if name != IGNORED_KEYS:
            raise UserError(f"--{name}: unknown option{nearest(name, [IGNORED_KEYS])}")
        if value not in MEANINGS:
            raise UserError(f"--{name}: must be {' or '.join(MEANINGS)} (value {value})")
        chosen = value
    return chosen


NETWORK_KEYS = (
    "model",
    "model.arch.type",
    *(f"{at}.{name}" for at in ("model", "model.model_config") for name in ("architectures", "model_type")),
)
SUBJECTS: tuple[Callable[[Reading], Any], ...] = (
    translate_mesh,
    translate_architecture,
    place_mtp_layers,
    translate_row_parts,
    translate_recomputation,
    translate_swap,
    translate_update,
    translate_text,
    translate_session,
    translate_monitor,
)


def translate(source: Document, as_written: bool = False, ignore_unknown: bool = False) -> Reading:
    """Translate a whole document. Mistakes and refusals are part of the result, nothing is raised.

    Args:
        as_written: take keys that MindFormers itself ignores at their word.
        ignore_unknown: report unknown keys as warnings, not as mistakes.
    """
    reading = Reading(source, as_written, ignore_unknown)
    drop_unread(reading)
    read_directory(reading)
    _plain_keys(reading)
    for subject in SUBJECTS:
        subject(reading)
    for path, value in leaves(source.data):
        if not reading.claimed(path) and not _is_unknown(reading, path):
            # not translated by any subject: an empty section, or a key of another form
            if _is_empty_section(path, value):
                reading.note(path, Outcome.WITHOUT_EFFECT, reason="empty")
            else:
                reading.note(path, Outcome.WITHOUT_EFFECT, reason="its section is not configured")
    if "device_target" not in reading.ours.data.get("context", {}):
        reading.set_omitted(
            "context.device_target", "context.device_target", "Ascend", "left out: the default of MindFormers"
        )
    reading.ours.problems = [*source.problems, *reading.unknown.values(), *_wrong_values(reading)]
    return reading


def _plain_keys(reading: Reading) -> None:
    """Translate keys that a table decides without other keys."""
    for path, value in leaves(reading.source.data):
        rule = rule_for(KEYS, path)
        if rule is None:
            if not (_is_unknown(reading, path) or _is_empty_section(path, value) or is_of_watcher(reading, path)):
                _report_unknown(reading, path)
        elif not rule.decided and not reading.claimed(path):
            if rule.outcome is Outcome.REFUSED:
                if value is None or value == "":
                    reading.note(path, Outcome.WITHOUT_EFFECT, reason="empty")
                else:
                    reading.note(path, Outcome.REFUSED, reason=rule.reason)
            elif rule.outcome is Outcome.WITHOUT_EFFECT:
                if not rule.only or value in rule.only:
                    reading.note(path, Outcome.WITHOUT_EFFECT, reason=rule.reason)
                else:
                    reading.note(path, Outcome.REFUSED, reason=rule.otherwise)
            elif value is None:
                reading.note(path, Outcome.WITHOUT_EFFECT, reason="empty")
            else:
                _carry(reading, path, value, rule)


def _carry(reading: Reading, path: KeyPath, value: Any, rule: Rule) -> None:
    """Translate a key that is used or renamed. Two names of a key must agree."""
    target = rule.target or dotted(path)
    present = _value_at(reading.ours.data, target)
    if present is not None and present != value:
        message = f"another name of {target}, which is given too (value {shown(present)}); keep one"
        reading.unknown[path] = Problem(closest_origin(reading.source.origins, path), path, message)
        return
    reading.put(target, value, path)
    if rule.outcome is Outcome.USED:
        reading.note(path, Outcome.USED, reason=rule.reason)
    else:
        reading.note(path, Outcome.TRANSLATED, f"{target}: {shown(value)}", rule.reason)


def _value_at(data: Any, target: str) -> Any:
    for part in target.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _is_empty_section(path: KeyPath, value: Any) -> bool:
    return value in (None, {}, []) and is_section(KEYS, path)


def _is_unknown(reading: Reading, path: KeyPath) -> bool:
    return any(path[:length] in reading.unknown for length in range(1, len(path) + 1)) or (
        reading.ignore_unknown and rule_for(KEYS, path) is None and reading.claimed(path)
    )


def _report_unknown(reading: Reading, path: KeyPath) -> None:
    """Add the mistake, or the warning, of a key that MindFormers does not have, at the outermost name that is wrong."""
    for length in range(1, len(path) + 1):
        outermost = path[:length]
        if not (isinstance(outermost[-1], int) or is_section(KEYS, outermost) or rule_for(KEYS, outermost) is not None):
            break
    origin = closest_origin(reading.source.origins, outermost)
    if reading.ignore_unknown:
        reading.has_ignored_keys = True
        reading.note(
            outermost, Outcome.WITHOUT_EFFECT, reason=f"unknown key of MindFormers, ignored ({IGNORE_UNKNOWN_KEYS})"
        )
        reading.warnings.append(f"{origin}: {dotted(outermost)}: unknown key of MindFormers, ignored")
        return
    value = _value_at_path(reading.source.data, outermost)
    text = "" if isinstance(value, dict | list) else f" (value {shown(value)})"
    hint = _similar_key(outermost) if len(reading.unknown) < MOST_SHOWN else ""
    reading.unknown[outermost] = Problem(origin, outermost, f"unknown key of MindFormers{text}{hint}")


def _similar_key(path: KeyPath) -> str:
    name = pattern_of(path).rpartition(".")[2]
    elsewhere = [] if name == "type" else places(KEYS, name)
    return f"; did you mean '{elsewhere[0]}'?" if elsewhere else nearest(name, siblings(KEYS, path))


def _value_at_path(data: Any, path: KeyPath) -> Any:
    for key in path:
        data = data[key]
    return data


def _wrong_values(reading: Reading) -> list[Problem]:
    """Return the refused keys as problems, one for all keys with the same reason."""
    by_reason: dict[str, list[Any]] = {}
    network_first = sorted(reading.entries.values(), key=lambda entry: entry.key not in NETWORK_KEYS)
    for entry in network_first:
        if entry.outcome is Outcome.REFUSED:
            by_reason.setdefault(entry.reason, []).append(entry)
    problems = []
    for reason, entries in by_reason.items():
        first, other_count = entries[0], len(entries) - 1
        value = "" if isinstance(first.value, dict) else f" (value {shown(first.value)})"
        more = f"; and {other_count} more such keys" if other_count else ""
        problems.append(Problem(first.origin, first.path, f"{reason}{value}{more}"))
    return problems
