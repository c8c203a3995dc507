"""The dry run of one published size of each family, all pipeline stages: what the fullest stage needs, and how long it took.

Every run is asked for as a user asks, by ``python -m toolkit.dry_run``, with nothing kept from earlier ones; one after the other.
Seconds are of this machine as it was then, whatever else it did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_file, run_command
from mindllm.config import RunConfig, load_config
from mindllm.errors import UserError
from mindllm.families import family_of
from mindllm.files import atomic_open
from mindllm.terminal.console import output
from mindllm.terminal.tables import Table, figures, texts
from mindllm.units import MIB, gigabytes
from toolkit.benchmark.report import write_markdown

EXAMPLES = """example:
  python -m toolkit.benchmark.dry_run_families --keep families.json --markdown docs/benchmarks/dry_run_families.md
  python -m toolkit.benchmark.dry_run_families --only gemma2 glm4
"""
COMMAND = "python -m toolkit.benchmark.dry_run_families --markdown docs/benchmarks/dry_run_families.md"
CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = (  # one of each family; smaller ones where the family has them and layers differ
    "llama2/pretrain_llama2_7b_8p",
    "qwen2_5/pretrain_qwen2_5_7b",
    "qwen3/pretrain_qwen3_8b",
    "mistral/pretrain_mistral_7b",
    "gemma/pretrain_gemma_7b",
    "gemma/pretrain_gemma2_2b",
    "gemma/pretrain_gemma3_1b",
    "glm/pretrain_chatglm3_6b",
    "glm/pretrain_glm4_9b_0414",
    "internlm/pretrain_internlm_7b",
    "internlm/pretrain_internlm2_20b",
    "baichuan/pretrain_baichuan_13b",
    "qwen/pretrain_qwen_7b",
    "bloom/pretrain_bloom_7b1",
    "gpt2/pretrain_gpt2_xl",
    "aquila/pretrain_aquila_7b",
    "telechat/pretrain_telechat2_7b",
    "telechat/pretrain_telechat3_36b",
    "mixtral/pretrain_mixtral_8x7b",
    "qwen2_moe/pretrain_qwen2_moe_57b",
    "qwen3_moe/pretrain_qwen3_moe_30b_a3b",
    "deepseek/pretrain_deepseek_v2_lite",
    "deepseek/pretrain_deepseek_v3_671b",
)
FITS, DOES_NOT_FIT = 0, 3
COLUMNS = (
    "family",
    "run",
    "devices",
    "stages",
    "fullest stage",
    "used peak GB",
    "with fragments GB",
    "limit GB",
    "seconds",
)


@dataclass(frozen=True)
class Row:
    """What the dry run of one shipped run said; MB are 2**20 bytes and GB 2**30, of the fullest stage.

    Attributes:
        fullest: number of that stage.
    """

    family: str
    run: str
    devices: int
    stages: int
    fullest: int
    used_mb: int
    actual_mb: int
    limit_mb: int
    seconds: float

    @property
    def cells(self) -> tuple[str, ...]:
        """One for each of ``COLUMNS``."""
        size = gigabytes([self.limit_mb], MIB)
        sizes = map(size, (self.used_mb, self.actual_mb, self.limit_mb))
        return (
            self.family, self.run.rpartition("/")[2], str(self.devices), str(self.stages), str(self.fullest), *sizes,
            f"{self.seconds:.0f}",
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all of them and prints the table."""
    parser = CommandParser(prog="python -m toolkit.benchmark.dry_run_families", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these families (default: all)")
    parser.add_argument(
        "--keep", type=output_file, metavar="FILE", help="write each row here; rows that it has are not made again"
    )
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the table as a page")
    options = parser.parse_args(arguments)
    rows = _kept(options.keep)
    for run in RUNS:
        config = load_config(CONFIGS / f"{run}.yaml")
        if any(row.run == run for row in rows) or (options.only and _family(config) not in options.only):
            continue
        rows.append(dry_run(run, config))
        output.print("  ".join(rows[-1].cells))
        if options.keep:
            with atomic_open(options.keep) as file:
                file.write(json.dumps([asdict(row) for row in rows], indent=1))
    if not rows:
        raise UserError(
            f"--only {' '.join(options.only)}: valid families: {', '.join(map(_family, map(_config, RUNS)))}"
        )
    ordered = sorted(rows, key=lambda row: RUNS.index(row.run))
    table = Table("", [*texts(*COLUMNS[:2]), *figures(*COLUMNS[2:])])
    for row in ordered:
        table.add_row(*row.cells)
    output.print(table)
    if options.markdown:
        cells = [row.cells for row in ordered]
        write_markdown(
            options.markdown, "The dry run of one size of each family", __doc__, COMMAND, [("Dry run", COLUMNS, cells)]
        )
    return 0


def _config(run: str) -> RunConfig:
    return load_config(CONFIGS / f"{run}.yaml")


def _family(config: RunConfig) -> str:
    return family_of(config.model.config).name


def _kept(path: Path | None) -> list[Row]:
    """The rows of an earlier run of this command."""
    if path is None or not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def dry_run(run: str, config: RunConfig) -> Row:
    """Asks for the dry run of ``configs/<run>.yaml`` in a process of its own, with an empty cache.

    Raises:
        UserError: the command failed; its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="mindllm_dry_runs_") as directory:
        command = [sys.executable, "-m", "toolkit.dry_run", "--config", str(CONFIGS / f"{run}.yaml"), "--json"]
        environment = {**os.environ, "XDG_CACHE_HOME": directory}
        started = time.monotonic()
        done = subprocess.run(
            [*command, "--output", f"{directory}/output"], env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - started
    if done.returncode not in (FITS, DOES_NOT_FIT):
        raise UserError(f"{run}: the dry run ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return row_of(run, config, json.loads(done.stdout), seconds)


def row_of(run: str, config: RunConfig, report: dict[str, Any], seconds: float) -> Row:
    """The row of one report of ``toolkit.dry_run --json``."""
    stages = report["stages"]
    fullest = max(stages, key=lambda stage: stage["actual_peak_mb"])
    return Row(
        _family(config), run, config.parallel_config.device_num, len(stages), fullest["stage"], fullest["used_peak_mb"],
        fullest["actual_peak_mb"], report["limit_mb"], seconds,
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
