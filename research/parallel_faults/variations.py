"""Correct runs: forms with other seeds, batches, widths and layouts. None of them may give an alarm."""

from __future__ import annotations

from typing import Any

OTHER = {
    "another seed": {"seed": 7},
    "a larger batch": {"runner_config.batch_size": 4},
    "no sequence parallel": {"parallel_config.use_seq_parallel": False},
    "whole optimizer state": {"parallel.enable_parallel_optimizer": False},
    "shared optimizer state": {"parallel.enable_parallel_optimizer": True},
    "three layers": {"model.model_config.num_layers": 3},
    "all recomputed": {"recompute_config.recompute": True},
}
VARIED = {
    "split_vocabulary": ("another seed", "a larger batch", "no sequence parallel", "three layers"),
    "accumulation": ("another seed", "a larger batch", "whole optimizer state", "three layers", "all recomputed"),
    "tied_in_chunks": ("another seed", "a larger batch", "no sequence parallel", "three layers", "all recomputed"),
    "interleaved_rows": ("another seed", "a larger batch", "all recomputed"),
    "sliced_activations": ("another seed", "a larger batch", "three layers"),
    "context_parallel_windows": ("another seed", "no sequence parallel", "whole optimizer state", "all recomputed"),
    "grouped_experts": ("another seed", "a larger batch", "shared optimizer state", "all recomputed"),
    "experts": ("another seed", "a larger batch", "whole optimizer state", "all recomputed"),
    "sharded_accumulators": ("another seed", "a larger batch", "all recomputed"),
    "gpipe": ("another seed", "a larger batch", "all recomputed"),
    "sliced_inputs": ("another seed", "a larger batch", "shared optimizer state", "all recomputed"),
}


def variations() -> list[tuple[str, str, dict[str, Any]]]:
    """Form, what is varied, and the keys that vary it."""
    return [(form, name, OTHER[name]) for form, names in VARIED.items() for name in names]
