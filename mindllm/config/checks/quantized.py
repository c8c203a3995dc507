"""Projections in codes on devices that share them: whether their rows, or the groups of their columns, can be divided.

A projection whose output is split is split by rows; one whose input is split is split by columns, and so by groups. An
order of columns (``desc_act``) reaches over all groups.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.architecture.quantization import CodeSpec
from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

KEY: KeyPath = ("model", "model_config", "quantized_base")
SPLIT_BY_ROWS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
SPLIT_BY_COLUMNS = ("attention.wo", "feed_forward.w2")


def check_codes(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Each kind of projection that tensor-parallel devices cannot divide."""
    parts = config.parallel_config.model_parallel
    if parts == 1 or config.model.config.quantization_config is None:
        return
    specs = {spec.module: spec for layer in config.model.config.architecture.specifications() for spec in layer.codes}
    for spec in specs.values():
        if problem := _problem(spec, parts):
            message = f"{spec.module} in codes {problem} (value {config.model.config.quantized_base})"
            yield KEY, f"{message}; write dequantize, or another model_parallel"


def _problem(spec: CodeSpec, parts: int) -> str:
    groups = spec.in_features // spec.group
    if spec.module in SPLIT_BY_ROWS:
        return ""
    if spec.module not in SPLIT_BY_COLUMNS:
        return "is not split over devices yet"
    if spec.ordered:
        return f"has columns in an order of their own (desc_act), which model_parallel {parts} does not divide"
    if groups % parts:
        return f"has {groups} groups of {spec.group} columns, which model_parallel {parts} does not divide"
    return ""
