"""Compare the memory of MindFormers' own program with ours on public YAMLs, both in MindSpore's dry run.

Each YAML is reduced alike for both programs: one layer for each stage and chunk, as many micro-batches as stages, layers
recomputed or not as the first of its stage 0, AdamW, random tokens. Widths, sequence length, layout and precision stay.
``mindllm offline`` runs both programs on the first rank of stage 0. MindFormers is 1.8 on MindSpore 2.7.2, from
``bash scripts/mindformers.sh``, so YAMLs of earlier releases run in a later program.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.outside import read_text
from mindllm.terminal.console import error_console
from toolkit.benchmark.mindformers import DATA, ENTERED, ENVIRONMENT, EXAMPLE, OURS, ROOT, THEIRS
from toolkit.benchmark.report import keep_rows, kept_rows, write_markdown

KEPT_SECTIONS = (
    "seed", "parallel", "parallel_config", "micro_batch_interleave_num", "context", "model",
)  # fmt: skip
COLUMNS = ("YAML", "recomputed", THEIRS, OURS, "difference", "with fragments: MindFormers", "mindllm")


@dataclass(frozen=True)
class Comparison:
    """Peaks of the first rank of stage 0 in MB; ``error`` is why a program has none, or empty."""

    name: str
    recomputed: bool
    theirs: int | None = None
    ours: int | None = None
    their_fragments: int | None = None
    our_fragments: int | None = None
    error: str = ""


def reduce_run(tree: Mapping[str, Any], data: str) -> dict[str, Any]:
    """Return a YAML of MindFormers with one layer for each stage and chunk, on random tokens."""
    run = {key: copy.deepcopy(tree[key]) for key in KEPT_SECTIONS if key in tree}
    model = run["model"]["model_config"]
    stages = int(run["parallel_config"].get("pipeline_stage", 1))
    model |= {
        "num_layers": stages * int(model.get("pp_interleave_num") or 1),
        "offset": 0,
        "checkpoint_name_or_path": "",
    }
    run["parallel_config"]["micro_batch_num"] = stages
    # MindFormers 1.8 has AdamW in place of the optimizers of earlier releases.
    run["optimizer"] = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1.0e-8}
    run["lr_schedule"] = {"type": "ConstantWarmUpLR", "learning_rate": 1.0e-6, "warmup_ratio": 0, "total_steps": -1}
    batch_size = tree.get("runner_config", {}).get("batch_size", 1)
    run["runner_config"] = {"epochs": 1, "batch_size": batch_size, "gradient_accumulation_steps": 1}
    run["recompute_config"] = {"recompute": recomputes_first(tree.get("recompute_config", {}))}
    dataset = {
        "data_loader": {"type": "MindDataset", "dataset_dir": data, "shuffle": False},
        "input_columns": ["input_ids"],
        "num_parallel_workers": 1,
        "drop_remainder": True,
        "repeat": 1,
        "batch_size": batch_size,
    }
    return run | {
        "use_legacy": True,
        "use_parallel": True,
        "run_mode": "train",
        "load_checkpoint": "",
        "output_dir": "./output",
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "reduced"},
        "train_dataset": dataset,
        "train_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": dataset},
    }


def recomputes_first(section: Mapping[str, Any]) -> bool:
    """Return True if the first layer of stage 0 is recomputed as a whole."""
    value = section.get("recompute", False)
    while isinstance(value, list):
        value = value[0] if value else False
    return bool(value)


def compare(path: Path, name: str, python: Path, seconds: float) -> Comparison:
    """Return the peaks of both programs on one YAML."""
    tree = yaml.safe_load(read_text(path))
    recomputed = recomputes_first(tree.get("recompute_config", {}))
    with tempfile.TemporaryDirectory(prefix="mindllm_beside_") as directory:
        place = Path(directory)
        run = reduce_run(tree, str(place / DATA))
        (place / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
        length = run["model"]["model_config"]["seq_length"]
        rows = 8 * run["parallel_config"].get("data_parallel", 1) * run["parallel_config"]["micro_batch_num"]
        rows *= run["runner_config"]["batch_size"] * run.get("micro_batch_interleave_num", 1)
        script = [str(python), str(EXAMPLE / "make_data.py"), f"--seq_length={length + 1}", f"--rows={rows}", DATA]
        subprocess.run(script, cwd=place, check=True, capture_output=True)
        theirs = [str(python), str(EXAMPLE / "run_mindformer.py"), "--config", str(place / "run.yaml")]
        own = [
            f"--train_dataset.data_loader.dataset_dir={place / DATA}",
            f"--output_dir={place / 'own'}",
            "--overwrite",
        ]
        ours = [sys.executable, str(ROOT / "run_llm.py"), "--config", str(place / "run.yaml"), *own]
        peaks: list[int] = []
        for command, variables in ((theirs, {}), (ours, {ENTERED: "1"})):
            tool = [sys.executable, "-m", "mindllm.main", "offline", "--json", "--ranks", "0", "--", *command]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
            try:
                result = subprocess.run(
                    tool, env=environment, cwd=place, capture_output=True, text=True, timeout=seconds, check=False
                )
                rank = json.loads(result.stdout.splitlines()[-1])["ranks"][0]
            except subprocess.TimeoutExpired:
                return Comparison(name, recomputed, error=f"no answer within {seconds:.0f} s")
            except (ValueError, IndexError, KeyError):
                lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
                return Comparison(name, recomputed, error=next((x for x in lines if "Error" in x), lines[-1])[:160])
            peaks += [rank["used_peak_mb"], rank["actual_peak_mb"]]
    return Comparison(name, recomputed, peaks[0], peaks[2], peaks[1] - peaks[0], peaks[3] - peaks[2])


def table_rows(found: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return the cells of the table, in MB of 2**20 bytes."""
    return [
        (
            row.name,
            "yes" if row.recomputed else "no",
            *(f"{size:,}" if size is not None else "" for size in (row.theirs, row.ours)),
            f"{100 * (row.ours / row.theirs - 1):+.1f}%" if row.ours and row.theirs else row.error,
            *(f"{size:,}" if size is not None else "" for size in (row.their_fragments, row.our_fragments)),
        )
        for row in found
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare both programs on YAMLs, and write the page."""
    parser = CommandParser(prog="python -m toolkit.benchmark.published_programs", description=__doc__)
    parser.add_argument("yamls", nargs="+", type=Path, metavar="YAML", help="below --releases")
    parser.add_argument("--releases", type=Path, required=True, metavar="DIR", help="checkouts of MindFormers")
    parser.add_argument("--python", type=Path, default=ENVIRONMENT / "bin" / "python", help="MindFormers' Python")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of one program (default: 600)")
    parser.add_argument("--keep", type=Path, metavar="JSON", help="file with results, read and extended")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    if not options.python.is_file():
        raise UserError(f"--python {options.python}: file not found; run: bash scripts/mindformers.sh")
    stored = {row["name"]: Comparison(**row) for row in kept_rows(options.keep, "name", ())}
    for path in options.yamls:
        if str(path) not in stored:
            error_console.print(str(path))
            stored[str(path)] = compare(options.releases / path, str(path), options.python.absolute(), options.seconds)
            keep_rows(options.keep, [asdict(row) for row in stored.values()])
    rows = table_rows(list(stored.values()))
    if options.markdown:
        command = "python -m toolkit.benchmark.published_programs --releases releases YAML…"
        tables = [("Used peak of stage 0, MB", COLUMNS, rows)]
        write_markdown(options.markdown, "Published YAMLs in both programs", __doc__, command, tables, "Causes")
    return 0


if __name__ == "__main__":
    run_command(main)
