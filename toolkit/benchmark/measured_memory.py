"""The formula of memory and the model of time beside what was measured: Megatron-LM over TransformerEngine on eight B200.

Figures are those of SimuMax's repository (github.com/MooreThreads/SimuMax, ``docs/b200/b200_release_v1.2_summary.json``, commit
4dcaae5): the most bytes that ``torch.cuda.max_memory_allocated`` says of a rank of each stage. Nothing else of it is used.
Llama 3 70B (12 layers) and 405B (4), DeepSeek-V2 and V3 (4), tensor, pipeline, expert and context parallel, nothing recomputed,
optimizer state split over replicas. Rows that differ in the number of micro-batches alone have the same peak, and are one.

Steps are predicted on ``toolkit/benchmark/b200.yaml``: the vendor's peaks and what kernels were measured to reach alone, nothing
fitted to a step.

Every other layout, in the order of the file, was looked at when the formula was given the forms of this software; the others
judge.

| column | formula |
|---|---|
| MindSpore's forms | as ``mindllm time`` has it, which dry runs of MindSpore hold: what it says of a program of another kind |
| its own forms | the same formula with what TransformerEngine keeps (``TRANSFORMER_ENGINE`` in ``mindllm/timing/workload.py``) |
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.command import run_command
from mindllm.config.model import ModelConfig
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.device import read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import step_seconds
from mindllm.timing.workload import TRANSFORMER_ENGINE, Numerics, Strategy, Workload
from mindllm.units import MIB
from toolkit.benchmark.published_steps import Row, even_plan, read_rows
from toolkit.benchmark.report import Tables, data_options, write_markdown

EXAMPLES = """example:
  python -m toolkit.benchmark.measured_memory --data tests/ground_truth --markdown docs/benchmarks/measured_memory.md
"""
FILE = "megatron_b200.csv"
DEVICE = Path(__file__).parent / "b200.yaml"
HALVES = ("looked at", "judges")
LAYOUT = ("model", "layers", "tp", "cp", "pp", "ep", "dp", "seq_length")
LATENT = {
    "num_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1, "capacity_factor": 1.0,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama3-70b": {
        "hidden_size": 8192, "num_heads": 64, "n_kv_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    },
    "llama3-405b": {
        "hidden_size": 16384, "num_heads": 128, "n_kv_heads": 16, "intermediate_size": 53248, "vocab_size": 128256,
    },
    "deepseekv2": {
        **LATENT, "hidden_size": 5120, "intermediate_size": 12288, "vocab_size": 102400, "expert_num": 160,
        "num_experts_chosen": 6, "moe_intermediate_size": 1536, "moe_shared_expert_intermediate_size": 3072,
    },
    "deepseekv3": {
        **LATENT, "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280, "expert_num": 256,
        "num_experts_chosen": 8, "moe_intermediate_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    },
}  # fmt: skip
"""Sizes as the launch scripts of the rows give them (``run_pretrain_llama3.sh``, ``run_pretrain_deepseekv2.sh``)."""


@dataclass(frozen=True)
class Peak:
    """A measured peak of a stage, and what the formula says in both forms; MiB."""

    layout: str
    stage: int
    judges: bool
    measured: float
    ours: float
    theirs: float


def workload_of_row(row: Row) -> Workload:
    """What a row trains, in the forms of TransformerEngine; heads are exchanged under context parallelism (``a2a``)."""
    tp, cp, pp, ep, dp = (int(row[key]) for key in ("tp", "cp", "pp", "ep", "dp"))
    layers, length = int(row["layers"]), int(row["seq_length"])
    sizes = {**MODELS[row["model"]], "num_layers": layers, "seq_length": length}
    strategy = Strategy(
        dp, tp, pp, int(row["micro_batches"]), sequence_parallel=tp > 1, optimizer_shard=True, expert_parallel=ep,
        expert_model_parallel=1, context_parallel=cp, exchanges_heads=cp > 1,
    )  # fmt: skip
    numerics = Numerics("bfloat16", forms=TRANSFORMER_ENGINE)
    architecture = ModelConfig.model_validate(sizes).architecture
    return Workload(architecture, length, strategy, even_plan(layers, pp, 1, full=False), numerics)


def peaks(data: Path) -> list[Peak]:
    """Every stage of every layout once.

    Raises:
        UserError: the table is missing.
    """
    layouts: dict[tuple[str, ...], Row] = {}
    for row in read_rows(data / FILE):
        layouts.setdefault(tuple(row[key] for key in LAYOUT), row)
    found = []
    for number, row in enumerate(layouts.values()):
        theirs = workload_of_row(row)
        ours = replace(theirs, numerics=Numerics("bfloat16"))
        measured = [float(size) for size in row["peak_mib_by_stage"].split()]
        said = zip(measured, stage_bytes(ours), stage_bytes(theirs), strict=True)
        for stage, (peak, one, other) in enumerate(said):
            found.append(Peak(_name(row), stage, number % 2 == 1, peak, one / MIB, other / MIB))
    return found


@dataclass(frozen=True)
class Step:
    """A measured step, and what the model of time says; seconds."""

    layout: str
    micro_batches: int
    judges: bool
    measured: float
    predicted: float


def steps(data: Path) -> list[Step]:
    """Every row.

    Raises:
        UserError: the table is missing.
    """
    device, layouts, found = read_device(str(DEVICE)), dict[tuple[str, ...], int](), list[Step]()
    for row in read_rows(data / FILE):
        number = layouts.setdefault(tuple(row[key] for key in LAYOUT), len(layouts))
        seconds = float(step_seconds(workload_of_row(row), [device])[0])
        found.append(Step(_name(row), int(row["micro_batches"]), number % 2 == 1, float(row["step_ms"]) / 1e3, seconds))
    return found


def step_tables(rows: Sequence[Step]) -> Tables:
    """A line for every step, and a line for each half."""
    lines = [
        (
            row.layout, str(row.micro_batches), HALVES[row.judges], f"{row.measured:.3f}", f"{row.predicted:.3f}",
            f"{100 * (row.predicted / row.measured - 1):+.1f}%",
        )
        for row in rows
    ]  # fmt: skip
    parts = [[row for row in rows if row.judges == judges] for judges in (False, True)]
    halves = [
        (HALVES[part[0].judges], str(len(part)), _sizes([row.predicted / row.measured - 1 for row in part]))
        for part in parts
    ]
    columns = ("layout", "micro-batches", "half", "measured s", "predicted s", "error")
    summary = ("half", "steps", "mean / median / worst")
    return [("Steps", columns, lines), ("Sizes of errors of steps", summary, halves)]


def _name(row: Row) -> str:
    sizes = [f"{key}{row[key]}" for key in ("dp", "tp", "cp", "pp", "ep") if row[key] != "1"]
    return f"{row['model']}, {' '.join(sizes)}, {int(row['seq_length']) // 1024}k"


def tables(rows: Sequence[Peak]) -> Tables:
    """A line for every peak, and a line for each half."""
    lines = [
        (
            row.layout, str(row.stage), HALVES[row.judges], f"{row.measured:,.0f}",
            f"{row.ours:,.0f}", _signed(row.ours, row), f"{row.theirs:,.0f}", _signed(row.theirs, row),
        )
        for row in rows
    ]  # fmt: skip
    columns = ("layout", "stage", "half", "measured MiB", "MindSpore's forms", "error", "its own forms", "error ")
    halves = [
        (
            name,
            str(len(part)),
            *(_sizes([getattr(row, form) / row.measured - 1 for row in part]) for form in ("ours", "theirs")),
        )
        for name, part in (
            ("looked at", [row for row in rows if not row.judges]),
            ("judges", [row for row in rows if row.judges]),
        )
    ]
    summary = ("half", "stages", "MindSpore's forms, mean / median / worst", "its own forms")
    return [("Peaks by stage", columns, lines), ("Sizes of errors", summary, halves)]


def _signed(said: float, row: Peak) -> str:
    return f"{100 * (said / row.measured - 1):+.1f}%"


def _sizes(errors: Sequence[float]) -> str:
    sizes = 100 * np.abs(errors)
    return f"{sizes.mean():.1f} / {np.median(sizes):.1f} / {sizes.max():.1f}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the peaks and both halves, and writes them as a page."""
    options = data_options("python -m toolkit.benchmark.measured_memory", __doc__, EXAMPLES, arguments)
    found = [*tables(peaks(options.data)), *step_tables(steps(options.data))]
    for title, columns, lines in found:
        words = 3 if len(lines) > len(HALVES) else 1
        output.print(Table(title, [*texts(*columns[:words]), *figures(*columns[words:])], lines))
    if options.markdown:
        command = "python -m toolkit.benchmark.measured_memory " + " ".join(arguments or sys.argv[1:])
        write_markdown(options.markdown, "Measured memory and steps", __doc__ or "", command, found, "What it says")
    return 0


if __name__ == "__main__":
    run_command(main)
