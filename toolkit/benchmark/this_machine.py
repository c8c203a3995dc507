"""Predicted and measured steps of this machine: a device fitted to eleven small runs, and sixteen that nothing was fitted to.

``python -m toolkit.benchmark.this_machine`` takes about five minutes of two cores. Others' work on them counts as the machine's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.accept.this_machine import FITTED, NOT_TOLD, TWO, Shape, described_here, llama, measure
from mindllm.command import output_file, run_command
from mindllm.terminal.console import output
from mindllm.terminal.render import drawn
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.device import Device
from mindllm.timing.measured.calibrate import Measured, calibrate
from mindllm.timing.step import step_seconds
from toolkit.benchmark.report import write_markdown

LORA: dict[str, Any] = {
    "pet_config": {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": ".*w[qkvo].*"}
}
JUDGED = (
    Shape("Llama, 320 x 3, 3 x 192", llama(320, 3, 192), 3),
    Shape("Llama, 256 x 4, 1 x 768", llama(256, 4, 768), 1),
    Shape("Llama, 192 x 4, 16 x 64", llama(192, 4, 64), 16),
    Shape("Llama, 1024 x 1, 2 x 128", llama(1024, 1, 128), 2),
    Shape("Llama, 32,000 tokens known", llama(256, 2, 128, 32000), 2),
    Shape("Llama, two key heads of four", llama(256, 4, 256, n_kv_heads=2), 2),
    Shape("Qwen 3", llama(256, 4, 256, model_type="qwen3", qk_layernorm=True, head_dim=64, n_kv_heads=2), 2),
    Shape("Mixtral, eight experts", llama(128, 4, 128, model_type="mixtral", expert_num=8, num_experts_chosen=2,
          capacity_factor=2.0, aux_loss_types=["expert"], aux_loss_factors=[0.01]), 4),
    Shape("Llama, everything recomputed", llama(256, 4, 256), 2, {"recompute_config.recompute": True}),
    Shape("Llama, LoRA", llama(256, 4, 256, **LORA), 2),
    Shape("Llama, four parts accumulated", llama(256, 4, 128), 2, {"runner_config.gradient_accumulation_steps": 4}),
    Shape("Llama, dropout", llama(256, 4, 256, attention_dropout=0.1, hidden_dropout=0.1), 2),
    Shape("Llama, bfloat16", llama(256, 4, 256, compute_dtype="bfloat16"), 2),
    Shape("Llama, float16, 512 x 2", llama(512, 2, 128, compute_dtype="float16"), 2),
    Shape("Llama, two processes", llama(256, 2, 512), 1, TWO),
    Shape("Llama, two processes, 512 x 2", llama(512, 2, 128), 2, TWO),
)  # fmt: skip
"""Width x layers, batch x length, of each process; where nothing is said 256 x 4 and 2 x 256."""
PAGE = """`mindllm time calibrate --here` measures this machine's CPU by eleven small runs, two of them in half precision and two
of two processes. The steps below are of sixteen others, which nothing was fitted to. Where nothing is said they compute in
float32, each in one process."""


def compared(rows: Sequence[Measured], device: Device) -> list[tuple[str, str, str, str]]:
    """Return name, measured and predicted seconds and the error of each run."""
    lines = []
    for row in rows:
        predicted = float(step_seconds(row.workload, [device])[0])
        lines.append(
            (row.name, f"{row.seconds:.3f}", f"{predicted:.3f}", f"{100 * (predicted / row.seconds - 1):+.1f}%")
        )
    return lines


def summary(rows: Sequence[Measured], device: Device) -> str:
    """Return the sizes of the errors in words."""
    found = 100 * np.abs([float(step_seconds(row.workload, [device])[0]) / row.seconds - 1 for row in rows])
    return f"mean {found.mean():.1f}%, median {np.median(found):.1f}%, worst {found.max():.1f}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, fit, measure others, and show both."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.benchmark.this_machine", description=__doc__)
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the page")
    options = parser.parse_args(arguments)
    start = described_here()
    with tempfile.TemporaryDirectory(prefix="mindllm_") as directory, drawn() as progress:
        fitted = [*measure(FITTED, Path(directory, "fitted"), progress)]
        judged = [*measure(JUDGED, Path(directory, "judged"), progress)]
    device = calibrate(start, fitted, f"calibrated on {len(fitted)} small runs of this machine", NOT_TOLD).device
    columns = ("run", "measured s", "predicted s", "error")
    tables = []
    for title, rows in (("Sixteen runs that nothing was fitted to", judged), ("The eleven it was fitted to", fitted)):
        lines = compared(rows, device)
        output.print(Table(title, [*texts(columns[0]), *figures(*columns[1:])], lines))
        output.print(f"sizes of errors: {summary(rows, device)}")
        tables.append((f"{title}: {summary(rows, device)}", columns, lines))
    if options.markdown:
        command = f"python -m toolkit.benchmark.this_machine --markdown {options.markdown}"
        write_markdown(options.markdown, "Predicted and measured on this machine", PAGE, command, tables)
    return 0


if __name__ == "__main__":
    run_command(main)
