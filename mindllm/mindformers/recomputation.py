"""Keys of recomputation, swapping and row interleaving, layer by layer, as MindFormers 1.3 to 2.1 reads them; their translation.

Its ``LayerSetting`` clamps lists to the layers of a stage. A stage that is left out has none. ``mp_comm_recompute`` and
``parallel_optimizer_comm_recompute`` have no effect, ``recompute_slice_activation`` only with ``recompute: true``, and a pattern
without a match does nothing. Every such key is reported; ``as_written`` applies it instead.

Patterns of ``swap_config`` name operators whose results move to the host. Multi-token prediction layers follow the last layer, on
the last stage: legacy networks count them in ``offset``, as mindllm does; mcore networks do not. ``fine_grain_interleave`` only
overlaps communication with computation.
"""

from __future__ import annotations

import re
from typing import Any

from mindllm.architecture.layer_counts import StageLayers, layer_counts
from mindllm.config.checks.sequence import MOST
from mindllm.config.recompute import LEVEL_SEPARATOR
from mindllm.mindformers.mesh import is_count, planned_layers
from mindllm.mindformers.reading import AS_WRITTEN, Outcome, Reading

SECTION = "recompute_config"
SELECTIONS = (
    "select_recompute",
    "select_comm_recompute",
    "select_recompute_exclude",
    "select_comm_recompute_exclude",
)
UNUSED = f"no release from 1.3 to 2.1 passes it on to a layer; {AS_WRITTEN} takes it at its word"
RENAMED = {  # operators of mcore networks under the names of our layers
    r"mlp\.mul": r"feed_forward\.mul",
    r"mlp\.activation_func\.mul": r"feed_forward\.mul",
    r"mlp\.activation_func\.silu": r"feed_forward\.w1\.activation\.silu",
    r"mlp\.activation_func": r"feed_forward\.w1\.activation\.silu",
    r"feed_forward\.activate\.silu": r"feed_forward\.w1\.activation\.silu",
    r"feed_forward\.silu": r"feed_forward\.w1\.activation\.silu",
    r"attention\.flash_attention": r"attention\.attention\.flash_attention",
    r"input_layernorm\.norm": r"attention_norm\.norm",
    r"pre_mlp_layernorm\.norm": r"ffn_norm\.norm",
}
OPERATORS = (
    "attention_add",
    "ffn_add",
    "attention_norm.cast",
    "attention_norm.norm",
    "attention.reshape",
    "attention.transpose",
    "attention.merge_transpose",
    "attention.wq.matmul",
    "attention.wq.cast",
    "attention.wk.matmul",
    "attention.wk.cast",
    "attention.wv.matmul",
    "attention.wv.cast",
    "attention.wo.matmul",
    "attention.wo.cast",
    "attention.rotary.cast",
    "attention.rotary.mul_cos",
    "attention.rotary.mul_sin",
    "attention.rotary.add",
    "attention.rotary.neg",
    "attention.rotary.split",
    "attention.rotary.concat",
    "attention.attention.flash_attention",
    "ffn_norm.cast",
    "ffn_norm.norm",
    "feed_forward.mul",
    "feed_forward.w1.matmul",
    "feed_forward.w1.cast",
    "feed_forward.w1.activation.silu",
    "feed_forward.w3.matmul",
    "feed_forward.w3.cast",
    "feed_forward.w2.matmul",
    "feed_forward.w2.cast",
)
"""Operators of a layer on a device, by path; a test compares them with the layer that is built."""
SHAPES_ONLY = re.compile(r".*(reshape|transpose|cast|split)$", re.IGNORECASE)


def translate_recomputation(reading: Reading) -> None:
    """Translate ``recompute_config``; mesh and model must have been translated."""
    layers = planned_layers(reading)
    key = f"{SECTION}.recompute"
    if reading.has(key):
        _clamped(reading, key, layers)
    for name in SELECTIONS:
        _selection(reading, name, layers)
    for name in ("mp_comm_recompute", "parallel_optimizer_comm_recompute"):
        key = f"{SECTION}.{name}"
        if not reading.has(key):
            continue
        if reading.as_written:
            reading.use(key)
        else:
            reading.idle(key, UNUSED)
    key = f"{SECTION}.recompute_slice_activation"
    if not reading.has(key):
        return
    if reading.as_written or reading.get(f"{SECTION}.recompute", False) is True or not reading.get(key):
        reading.use(key)
    else:
        reading.idle(key, f"MindFormers uses it with recompute: true only; {AS_WRITTEN} takes it at its word")


def _clamped(reading: Reading, key: str, layers: StageLayers | None) -> None:
    value = reading.get(key)
    counts, reason = clamp(value, layers)
    if counts is None:
        reading.refuse(key, reason)
    else:
        reading.translate(key, key, counts, reason)


def clamp(value: Any, layers: StageLayers | None) -> tuple[Any, str]:
    """Return the counts that MindFormers makes of ``value`` for layers per ``[chunk][stage]``, and a remark on changes."""
    if not isinstance(value, list) or layers is None or not value:
        return value, ""
    rows = [row for row in value if isinstance(row, list)]
    if rows and (len(rows) != len(value) or len(rows) != len(layers)):
        return value, ""  # the schema reports the error
    available = [list(row) for row in layers] if rows else [[sum(stage) for stage in zip(*layers, strict=True)]]
    lists = rows or [value]
    if any(len(row) > len(row_layers) for row, row_layers in zip(lists, available, strict=True)):
        return None, f"has more entries than the {len(layers[0])} stages"
    fitted = [_fit(row, row_layers) for row, row_layers in zip(lists, available, strict=True)]
    reason = "" if fitted == lists else "clamped to the layers that a stage has, as MindFormers does"
    return (fitted if rows else fitted[0]), reason


def _fit(row: list[Any], layers: list[int]) -> list[Any]:
    padded = [*row, *[0] * (len(layers) - len(row))]
    return [
        min(count, most) if isinstance(count, int) and not isinstance(count, bool) else count
        for count, most in zip(padded, layers, strict=True)
    ]


def _selection(reading: Reading, name: str, layers: StageLayers | None) -> None:
    key = f"{SECTION}.{name}"
    if not reading.has(key):
        return
    value = reading.get(key)
    if isinstance(value, dict):
        # patterns with counts: one entry for every pattern
        selection: dict[str, Any] = {}
        path = (SECTION, key.removeprefix(f"{SECTION}."))
        for source, counts in value.items():
            ours, reason = known_pattern(reading, source)
            if ours is None:
                reading.note((*path, source), Outcome.WITHOUT_EFFECT, reason=reason)
                continue
            fitted, change = clamp(counts, layers)
            if fitted is None:
                reading.note((*path, source), Outcome.REFUSED, reason=change)
                continue
            selection[ours] = fitted
            is_same = ours == source and fitted == counts
            outcome = Outcome.USED if is_same else Outcome.TRANSLATED
            reading.note((*path, source), outcome, "" if is_same else f"{ours}: {fitted}", reason or change)
        reading.put(key, selection or False, path)
    elif isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        matches = {source: known_pattern(reading, source) for source in value}
        patterns = list(dict.fromkeys(ours for ours, _ in matches.values() if ours is not None))
        dropped = [source for source, (ours, _) in matches.items() if ours is None]
        reason = f"omitted, {matches[dropped[0]][1]}: {', '.join(dropped)}" if dropped else ""
        reading.translate(key, key, patterns or False, reason)
    elif name.endswith("exclude") and value is not False:
        reading.refuse(key, "write the patterns that are excluded")
    else:
        _clamped(reading, key, layers)


def known_pattern(reading: Reading, pattern: str) -> tuple[str | None, str]:
    """Return the pattern of mindllm for one of MindFormers, or None and the reason."""
    if pattern in RENAMED:
        return RENAMED[pattern], "the operator's name here"
    if pattern.startswith(r"mlp\.shared_experts"):
        return None, "a dense model has no shared expert"
    if any(matches(pattern, operator) for operator in OPERATORS):
        return pattern, ""
    if SHAPES_ONLY.match(pattern):
        return None, "no effect: no such operator stores a separate result"
    if reading.as_written:
        return pattern, ""
    return (
        None,
        f"it matches no operator of a layer, where MindFormers does nothing without a word; {AS_WRITTEN} refuses it",
    )


def matches(pattern: str, operator: str) -> bool:
    """Return True if a pattern matches an operator, or a cell around it, level by level."""
    levels, names = pattern.split(LEVEL_SEPARATOR), operator.split(".")
    try:
        return len(levels) <= len(names) and all(map(re.fullmatch, levels, names))
    except re.error:
        return True  # the schema reports the error


SWAP_SECTION = "swap_config"
KEYS = ("swap", "default_prefetch", "layer_swap", "op_swap")
EVERYWHERE = r".*\.flash_attention"
OFFSET = "model.model_config.offset"
REASON = "layers that predict ahead are placed by it here: on the last stage, as there"
KEY = "model.model_config.fine_grain_interleave"
UNSPLIT_FEATURES = {
    "expert_num": "experts process all tokens together",
    "kv_lora_rank": "latent attention processes all tokens together",
    "hidden_dropout": "dropout is drawn for whole sequences",
    "attention_dropout": "dropout is drawn for whole sequences",
    "num_nextn_predict_layers": "multi-token prediction layers process all tokens together",
}
"""Keys of mindllm that prevent splitting of tokens, if they exceed the value of a plain layer."""


def translate_swap(reading: Reading) -> None:
    """Translate ``swap_config``; ``recompute_config`` must have been translated."""
    keys = [f"{SWAP_SECTION}.{key}" for key in KEYS if reading.has(f"{SWAP_SECTION}.{key}")]
    if reading.get(f"{SWAP_SECTION}.swap") is not True:
        for key in keys:
            reading.idle(key, "nothing is swapped")
        return
    for name in ("recompute", *SELECTIONS):
        if isinstance(reading.get(f"recompute_config.{name}"), list | dict):
            message = "with swap_config.swap a list has numbers of layers in MindFormers, and counts without"
            reading.refuse(f"recompute_config.{name}", f"{message}; write true or false")
    for key in keys:
        if key.endswith(".op_swap") and reading.get(key) is not None:
            _operators(reading, key)
        else:
            reading.use(key)


def _operators(reading: Reading, key: str) -> None:
    """Return the operators by their names in mindllm. MindFormers ignores patterns without a match."""
    value = reading.get(key)
    entries, dropped = [], []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or "op_name" not in entry:
            reading.use(key)  # the schema reports the error
            return
        names = entry["op_name"] if isinstance(entry["op_name"], list) else [entry["op_name"]]
        names_by_pattern = {str(name): _ours(reading, str(name)) for name in names}
        dropped += [name for name, ours in names_by_pattern.items() if ours is None]
        if operators := [ours for ours in names_by_pattern.values() if ours is not None]:
            entries.append({**entry, "op_name": operators})
    reason = f"left out, no operator of a layer here: {', '.join(dropped)}" if dropped else ""
    ours: Any = entries or None
    reading.translate(key, key, ours, reason)


def _ours(reading: Reading, pattern: str) -> str | None:
    known = pattern if pattern != EVERYWHERE else r"attention\.flash_attention"
    return known_pattern(reading, known.replace("self_attention", "attention").replace("core_attention", "attention"))[
        0
    ]


def place_mtp_layers(reading: Reading) -> None:
    """Add multi-token prediction layers to the last stage of an ``offset`` that does not count them."""
    model = reading.ours.data.get("model", {}).get("model_config", {})
    stages = reading.ours.data.get("parallel_config", {}).get("pipeline_stage", 1)
    chunks, layers, mtp_layers = (
        model.get(key, 1) for key in ("pp_interleave_num", "num_layers", "num_nextn_predict_layers")
    )
    if (
        "num_nextn_predict_layers" not in model
        or not all(map(is_count, (stages, chunks, layers, mtp_layers)))
        or stages == 1
    ):
        return
    offset = model.get("offset", 0)
    if _counts(layers + mtp_layers, stages, chunks, offset) or not (counts := _counts(layers, stages, chunks, offset)):
        return
    average = (layers + mtp_layers) // (stages * chunks)
    rows = [[count - average for count in row] for row in counts]
    rows[-1][-1] += mtp_layers
    placed = rows if chunks > 1 else rows[0]
    if reading.has(OFFSET):
        reading.translate(OFFSET, OFFSET, placed, REASON)
    else:
        reading.set_omitted(OFFSET, OFFSET, placed, REASON)


def _counts(layers: int, stages: int, chunks: int, offset: object) -> StageLayers | None:
    """Return the layers per chunk and stage; None if they are invalid."""
    try:
        return layer_counts(layers, stages, chunks, offset)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None


def translate_row_parts(reading: Reading) -> None:
    """Translate row interleaving; architecture and mesh must have been translated."""
    if not reading.has(KEY):
        return
    parts = reading.get(KEY)
    if parts is None or parts == 1:
        reading.idle(KEY, "tokens are not split")
    elif not is_count(parts):
        reading.refuse(KEY, "must be a number of parts")
    elif reason := _not_cut(reading):
        reading.idle(KEY, f"{reason}: it only hides exchanges, and computes the same")
    else:
        more = f"MindSpore orders {MOST} parts, and leaves more in an order of chance" if parts > MOST else ""
        reading.translate(KEY, KEY, min(parts, MOST), more)


def _not_cut(reading: Reading) -> str:
    model = reading.ours.data.get("model", {}).get("model_config", {})
    sizes = reading.ours.data.get("parallel_config", {})
    if sizes.get("model_parallel", 1) == 1:
        return "without model_parallel a layer exchanges nothing, and MindFormers cuts nothing"
    if sizes.get("context_parallel", 1) > 1:
        return "ranks share each sequence"
    if reading.ours.data.get("micro_batch_interleave_num", 1) > 1:
        return "micro_batch_interleave_num makes whole copies"
    for key, reason in UNSPLIT_FEATURES.items():
        if (model.get(key) or 0) > (key == "expert_num"):
            return reason
    return ""
