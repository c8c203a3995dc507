"""Where layers that predict ahead stand: behind the last layer, on the last stage.

MindFormers' older networks count them in ``offset``, as is done here; the newer ones (mcore) place the other layers alone.
"""

from __future__ import annotations

from mindllm.architecture.layer_counts import StageLayers, layer_counts
from mindllm.mindformers.mesh import is_count
from mindllm.mindformers.reading import Reading

OFFSET = "model.model_config.offset"
REASON = "layers that predict ahead are placed by it here: on the last stage, as there"


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
