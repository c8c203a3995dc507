"""Cross checks of ``swap_config``: where MindSpore moves results to the host, and layers that are there."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

Finding = tuple[KeyPath, str]
SECTION = "swap_config"


def check_swap(config: RunConfig) -> Iterator[Finding]:
    """What is moved, and that it can be."""
    swap = config.swap_config
    if not swap.swap:
        for key in ("layer_swap", "op_swap"):
            if getattr(swap, key) is not None:
                yield (SECTION, key), "nothing is moved to the host (swap_config.swap: false); write true, or remove it"
        return
    sizes, layers = config.parallel_config, config.model.config.layer_count
    if sizes.pipeline_stage == 1:
        message = "MindSpore moves results only of a network that the micro-batches of a pipeline share (value true)"
        yield (SECTION, "swap"), f"{message}; write false, or parallel_config.pipeline_stage above 1"
    if beyond := sorted(number for number in swap.numbers() if number >= layers):
        yield (SECTION,), f"names layer {beyond[0]}, where layers have numbers from 0 to {layers - 1}"
