"""Unplanned runs: layers spread evenly over the stages, nothing recomputed."""

from __future__ import annotations

from typing import Any

from mindllm.architecture.layer_counts import layer_counts
from mindllm.config import RunConfig, override_config
from mindllm.reduced_runs.layers import unfolded


def even_run(config: RunConfig) -> RunConfig:
    """Return the run with one chunk per stage, from which small runs are cut."""
    return override_config(config, even_keys(config, config.parallel_config.pipeline_stage, 1))


def even_keys(config: RunConfig, stages: int, chunks: int) -> dict[str, Any]:
    """Return the keys that spread the layers evenly over stages and chunks, and recompute nothing."""
    layers = config.model.config.layer_count
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
    """Return the layers per ``[chunk][stage]``; the first stages get the remainder, since the last has the head."""
    remainder = layers % (stages * chunks)
    offset = tuple(tuple(int(chunk * stages + stage < remainder) for stage in range(stages)) for chunk in range(chunks))
    return layer_counts(layers, stages, chunks, offset)
