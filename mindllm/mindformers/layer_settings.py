"""Settings of MindFormers about layers: ``swap_config``, layers that predict ahead, ``fine_grain_interleave``.

The patterns of ``swap_config`` name operators of its layers whose results wait on the host.

Layers that predict ahead stand behind the last layer, on the last stage. MindFormers' older networks count them in ``offset``,
as is done here; the newer ones (mcore) place the other layers alone.

With ``fine_grain_interleave`` parts of tokens hide each other's exchanges. What is computed is the same.
"""

from __future__ import annotations

from typing import Any

from mindllm.architecture.layer_counts import StageLayers, layer_counts
from mindllm.config.checks.sequence import MOST
from mindllm.mindformers.mesh import is_count
from mindllm.mindformers.reading import Reading
from mindllm.mindformers.recomputation import SELECTIONS, known_pattern

SECTION = "swap_config"
KEYS = ("swap", "default_prefetch", "layer_swap", "op_swap")
EVERYWHERE = r".*\.flash_attention"
OFFSET = "model.model_config.offset"
REASON = "layers that predict ahead are placed by it here: on the last stage, as there"
KEY = "model.model_config.fine_grain_interleave"
NEEDS_WHOLE_ROWS = {
    "expert_num": "experts take their tokens at once",
    "kv_lora_rank": "latent attention takes its tokens at once",
    "hidden_dropout": "dropout is drawn for whole sequences",
    "attention_dropout": "dropout is drawn for whole sequences",
    "num_nextn_predict_layers": "layers that predict ahead take their tokens at once",
}
"""Keys of our architecture with which layers are not cut here, where they are above what a plain layer has."""


def translate_swap(reading: Reading) -> None:
    """Every key of ``swap_config``; those of ``recompute_config`` must have been translated."""
    given = [f"{SECTION}.{key}" for key in KEYS if reading.has(f"{SECTION}.{key}")]
    if reading.get(f"{SECTION}.swap") is not True:
        for key in given:
            reading.idle(key, "nothing is swapped")
        return
    for name in ("recompute", *SELECTIONS):
        if isinstance(reading.get(f"recompute_config.{name}"), list | dict):
            message = "with swap_config.swap a list has numbers of layers in MindFormers, and counts without"
            reading.refuse(f"recompute_config.{name}", f"{message}; write true or false")
    for key in given:
        if key.endswith(".op_swap") and reading.get(key) is not None:
            _operators(reading, key)
        else:
            reading.use(key)


def _operators(reading: Reading, key: str) -> None:
    """The list of operators under the names that they have here; MindFormers does nothing for one that matches none."""
    value = reading.get(key)
    entries, dropped = [], []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or "op_name" not in entry:
            reading.use(key)  # our schema says what is wrong with it
            return
        names = entry["op_name"] if isinstance(entry["op_name"], list) else [entry["op_name"]]
        found = {str(name): _ours(reading, str(name)) for name in names}
        dropped += [name for name, ours in found.items() if ours is None]
        if kept := [ours for ours in found.values() if ours is not None]:
            entries.append({**entry, "op_name": kept})
    reason = f"left out, no operator of a layer here: {', '.join(dropped)}" if dropped else ""
    ours: Any = entries or None
    reading.translate(key, key, ours, reason)


def _ours(reading: Reading, pattern: str) -> str | None:
    theirs = pattern if pattern != EVERYWHERE else r"attention\.flash_attention"
    return known_pattern(reading, theirs.replace("self_attention", "attention").replace("core_attention", "attention"))[
        0
    ]


def place_layers_ahead(reading: Reading) -> None:
    """Adds such layers to the last stage of an ``offset`` that leaves them out."""
    model = reading.ours.data.get("model", {}).get("model_config", {})
    stages = reading.ours.data.get("parallel_config", {}).get("pipeline_stage", 1)
    chunks, layers, ahead = (
        model.get(key, 1) for key in ("pp_interleave_num", "num_layers", "num_nextn_predict_layers")
    )
    if (
        "num_nextn_predict_layers" not in model
        or not all(map(is_count, (stages, chunks, layers, ahead)))
        or stages == 1
    ):
        return
    offset = model.get("offset", 0)
    if _counts(layers + ahead, stages, chunks, offset) or not (counts := _counts(layers, stages, chunks, offset)):
        return
    average = (layers + ahead) // (stages * chunks)
    rows = [[count - average for count in row] for row in counts]
    rows[-1][-1] += ahead
    placed = rows if chunks > 1 else rows[0]
    if reading.has(OFFSET):
        reading.translate(OFFSET, OFFSET, placed, REASON)
    else:
        reading.left_out(OFFSET, OFFSET, placed, REASON)


def _counts(layers: int, stages: int, chunks: int, offset: object) -> StageLayers | None:
    """Layers of every place; None where they do not come out."""
    try:
        return layer_counts(layers, stages, chunks, offset)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None


def translate_row_parts(reading: Reading) -> None:
    """The key, once architecture and mesh have been translated."""
    if not reading.has(KEY):
        return
    parts = reading.get(KEY)
    if parts is None or parts == 1:
        reading.idle(KEY, "tokens are taken at once")
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
    for key, reason in NEEDS_WHOLE_ROWS.items():
        if (model.get(key) or 0) > (key == "expert_num"):
            return reason
    return ""
