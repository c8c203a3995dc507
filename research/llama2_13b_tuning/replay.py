"""Predicts every rung of the tuning ladder from its YAML, beside what was published; then plans rung 1 anew."""

from __future__ import annotations

import csv
import time
from pathlib import Path

from mindllm.config import load_config
from mindllm.planning.costs.formula import MILLISECONDS, plan_problem
from mindllm.planning.solve import solve
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.step import StepTime, step_time
from mindllm.timing.workload import Workload

HERE = Path(__file__).parent
PUBLISHED = HERE.parents[1] / "tests" / "ground_truth" / "llama2_13b_tuning.csv"
GB = 1 << 30


def rungs() -> list[tuple[int, float, StepTime]]:
    """Number, published tokens/s/device and predicted step of every rung."""
    device = read_device(DEFAULT)
    rows = csv.DictReader(PUBLISHED.read_text(encoding="utf-8").splitlines())
    return [
        (int(row["step"]), float(row["tokens_per_s_per_device"]), step_time(_workload(int(row["step"])), device))
        for row in rows
    ]


def _workload(rung: int) -> Workload:
    return workload_of(load_config(HERE / f"step_{rung}.yaml"))


def main() -> None:
    """Prints the ladder, and the planner's answer."""
    found = rungs()
    first, lowest = found[0][1], found[0][2].tokens_per_device
    rows = []
    for number, published, step in found:
        predicted = step.tokens_per_device
        gains = f"{100 * (published / first - 1):+.1f}%", f"{100 * (predicted / lowest - 1):+.1f}%"
        rows.append(
            (
                str(number),
                f"{published:,.0f}",
                f"{predicted:,.0f}",
                f"{100 * (predicted / published - 1):+.1f}%",
                *gains,
            )
        )
    columns = figures("published tokens/s/device", "predicted", "error", "published gain", "predicted gain")
    output.print(Table("Llama 2 13B on Atlas 800T A2", [*texts("rung"), *columns], rows))
    limit = max(stage_bytes(found[-1][2].workload))
    begun = time.monotonic()
    planned = solve(plan_problem(found[1][2].workload, found[1][2].device, limit, "rung 1"), 20.0)
    spent = time.monotonic() - begun
    output.print(
        f"planned anew from rung 1 within the {limit / GB:.1f} GB that rung 5 takes by the same formula: "
        f"{planned.best.step_time / MILLISECONDS:.2f} s a step, found in {spent:.1f} s; "
        f"by hand {found[-1][2].seconds:.2f} s"
    )


if __name__ == "__main__":
    main()
