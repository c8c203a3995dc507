"""What the dry run says: the table for people, the object for programs, the log of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from mindllm.compiled.simulation.simulation import ACTIVATIONS, CATEGORIES, GRADIENTS, OPTIMIZER, WEIGHTS
from mindllm.config import RunConfig
from mindllm.dry_run.forecast import StageMemory
from mindllm.dry_run.workspace import attention_elements_of, peak_with_workspace
from mindllm.terminal.tables import Table, figures, texts
from mindllm.terminal.text import styled
from mindllm.timing.verdict import limit_text
from mindllm.units import DEVICE_GB, MIB, Gigabytes, device_memory, gigabytes

IN_JSON = {"weights_mb": WEIGHTS, "optimizer_mb": OPTIMIZER, "gradients_mb": GRADIENTS, "activations_mb": ACTIVATIONS}


def json_report(memories: Sequence[StageMemory], limit: int) -> dict[str, Any]:
    """``{"fits", "limit_mb", "stages": […]}``; a MB is 2**20 bytes, as in MindSpore's lines.

    ``planned_mb``: of the peak, what MindSpore planned as a whole, see :func:`about_planned`.
    """
    return {
        "fits": all(memory.device_peak <= limit for memory in memories),
        "limit_mb": limit // MIB,
        "stages": [
            {
                "stage": memory.stage.number,
                "rank": memory.stage.rank,
                "layers": memory.stage.layers,
                **{key: round(memory.by_category[category] / MIB, 1) for key, category in IN_JSON.items()},
                "planned_mb": round(memory.planned_bytes / MIB, 1),
                "used_peak_mb": memory.used_peak // MIB,
                "actual_peak_mb": memory.actual_peak // MIB,
                "fits": memory.device_peak <= limit,
            }
            for memory in memories
        ],
    }


def about_planned(memory: StageMemory) -> str | None:
    """Says what the categories of planned memory are, where there is some."""
    if not memory.planned_bytes:
        return None
    return (
        f"stage {memory.stage.number}: {device_memory(memory.planned_bytes)} of it are blocks that MindSpore plans for the "
        "whole graph (SomasMemory, memory_optimize_level: O1), told by what lies in them at the fullest moment of the plan; "
        "with O0 every tensor has a block of its own"
    )


def about_fragments(actual_peaks: Sequence[int], needed: Sequence[int], limit: int) -> str | None:
    """Return the condition under which a peak fits that is above the limit with fragments; None where no such peak is."""
    if not any(size <= limit < actual for size, actual in zip(needed, actual_peaks, strict=True)):
        return None
    return (
        f"with fragments {device_memory(max(actual_peaks))}, above the limit: on Atlas A2 and A3 with driver 24 or newer "
        "MindSpore maps idle pages to other addresses, unlike its dry run; never set MS_ALLOC_CONF=enable_vmm:False"
    )


def about_routing(config: RunConfig) -> str | None:
    """Says for which routing figures hold, where a rank has as much of the tokens as the router sends it."""
    if not config.sends_tokens:
        return None
    return (
        "moe_token_dispatcher_type: alltoall: figures hold for balanced routing, each rank getting as many tokens as it sends; "
        "what experts keep of tokens grows with what a rank gets"
    )


def table(memories: Sequence[StageMemory], config: RunConfig, limit: int) -> Table:
    """One row per stage; all figures in GB (2**30 bytes) at the moment of the peak."""
    gb, elements = gigabytes(memory.actual_peak for memory in memories), attention_elements_of(config)
    memory_columns = (*CATEGORIES, "used peak", "with fragments", "with workspace ≈")
    rows = Table(
        f"Memory of the first rank of each stage at its peak, {DEVICE_GB} ({limit_text(limit, reserved=0.0)})",
        [*figures("stage", "rank", "layers"), *texts("recompute"), *figures(*memory_columns), *texts("verdict", "how")],
    )
    for memory in memories:
        used, actual = memory.used_peak, memory.actual_peak
        needed = memory.device_peak
        extra = memory.with_workspace(elements) - needed
        about = "" if memory.exact else "≈ "
        rows.add_row(
            str(memory.stage.number),
            str(memory.stage.rank),
            str(memory.stage.layers),
            memory.stage.recompute,
            *(gb(memory.by_category[category]) for category in CATEGORIES),
            styled((gb(used), "bold")),
            f"{about}{gb(actual)}",
            gb(needed + extra),
            verdict(needed, extra, limit, gb),
            memory.method,
        )
    return rows


def verdict(needed: int, workspace: int, limit: int, gb: Gigabytes) -> Text:
    """Return ``fits``, ``tight`` (not with the estimated workspace), or the shortage, with the digits of the table."""
    if needed > limit:
        return styled((f"{gb.at_least(needed - limit)} GB short", "bold red"))
    return styled(("fits", "green") if needed + workspace <= limit else ("tight", "yellow"))


def log_lines(memory: StageMemory, config: RunConfig, device_memory: int, limit: int) -> list[str]:
    """The log of a rank: what it is about, what MindSpore said, and the five lines a dry run ends with."""
    stage = memory.stage
    lines = [
        f"stage {stage.number}, rank {stage.rank}: {stage.layers} layers ({stage.recompute}), "
        f"{stage.alive} micro-batches alive; {memory.method}",
        *memory.shown.messages,
        *(f"{category}: {size / MIB:.1f}M" for category, size in memory.by_category.items()),
        *filter(None, [about_planned(memory), about_routing(config)]),
        f"estimated peak with workspace of kernels: {peak_with_workspace(memory.moments, attention_elements_of(config)) // MIB}M",
    ]
    return [
        *lines,
        f"Device MOC memory size: {device_memory // MIB}M",
        f"MindSpore Used memory size: {limit // MIB}M",
        "MindSpore memory base address: 0",
        f"Used peak memory usage (without fragments): {memory.used_peak // MIB}M",
        f"Actual peak memory usage (with fragments): {memory.actual_peak // MIB}M",
    ]
