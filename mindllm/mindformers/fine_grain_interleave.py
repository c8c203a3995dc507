"""``fine_grain_interleave`` of MindFormers: parts of tokens that hide each other's exchanges. What is computed is the same."""

from __future__ import annotations

from mindllm.config.checks.fine_grain_interleave import MOST
from mindllm.mindformers.mesh import is_count
from mindllm.mindformers.reading import Reading

KEY = "model.model_config.fine_grain_interleave"
NEEDS_WHOLE_ROWS = {
    "expert_num": "experts take their tokens at once",
    "kv_lora_rank": "latent attention takes its tokens at once",
    "hidden_dropout": "dropout is drawn for whole sequences",
    "attention_dropout": "dropout is drawn for whole sequences",
    "num_nextn_predict_layers": "layers that predict ahead take their tokens at once",
}
"""Keys of our architecture with which layers are not cut here, where they are above what a plain layer has."""


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
