"""Plain runs: layers spread evenly over the stages and nothing recomputed, as before anything is planned."""

from __future__ import annotations

from typing import Any

from mindllm.architecture.layer_counts import layer_counts
from mindllm.config import RunConfig, override_config
from mindllm.reduced_runs.layers import unfolded


def even_run(config: RunConfig) -> RunConfig:
    """Return the run with one chunk per stage: what small runs are cut from."""
    return override_config(config, even_keys(config, config.parallel_config.pipeline_stage, 1))


def even_main_layers(config: RunConfig) -> RunConfig:
    """Return the same run without layers that predict ahead."""
    if not config.model.config.num_nextn_predict_layers:
        return even_run(config)
    layers = len(config.model.config.architecture.main_layers)
    keys = even_keys(config, config.parallel_config.pipeline_stage, 1, layers)
    return override_config(config, {**keys, "model.model_config.num_nextn_predict_layers": 0})


def even_keys(config: RunConfig, stages: int, chunks: int, layers: int | None = None) -> dict[str, Any]:
    """Return the keys that spread so many layers (None: the run's) evenly over stages and chunks, and recompute nothing."""
    layers = layers or config.model.config.layer_count
    average = layers // (stages * chunks)
    offset = [[count - average for count in row] for row in even_counts(layers, stages, chunks)]
    return {
        "parallel_config.pipeline_stage": stages,
        "parallel.pipeline_config.pipeline_interleave": chunks > 1,
        **unfolded(config),
        "model.model_config.pp_interleave_num": chunks,
        "model.model_config.offset": offset if chunks > 1 else offset[0],
        **{f"recompute_config.{key}": False for key in ("recompute", "select_recompute", "select_comm_recompute")},
    }


def even_counts(layers: int, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers per ``[chunk][stage]``; what is left over is on the first stages, for the last has the head."""
    left = layers % (stages * chunks)
    offset = tuple(tuple(int(chunk * stages + at < left) for at in range(stages)) for chunk in range(chunks))
    return layer_counts(layers, stages, chunks, offset)
