"""Error of the peak memory that liveness estimates, against MindSpore's own dry run and the statistic of its pool on a CPU.

Published widths with few layers, because a layer adds what the one before it added, and one small model. The pool on a CPU
does not hold parameters, so only what a step makes is compared there.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm.command import CommandParser, output_directory, output_file, run_command
from mindllm.compiled.graph.compiled_graph import CompiledGraph
from mindllm.compiled.graph.file import load, save
from mindllm.compiled.graph.liveness import PARAMETER, Liveness, estimate
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.compiled.rank.worker_process import run_worker
from mindllm.compiled.simulation.simulate_rank import simulate_rank
from mindllm.compiled.simulation.simulation import Simulation, load_simulation
from mindllm.config import RunConfig, load_config, render_config
from mindllm.files import atomic_open
from mindllm.terminal.console import output, track
from mindllm.terminal.tables import Table, figures, texts
from mindllm.units import MIB
from toolkit.benchmark.report import write_markdown

EXAMPLES = """example:
  python -m toolkit.benchmark.liveness
  python -m toolkit.benchmark.liveness --keep compiled/ --markdown docs/benchmarks/liveness.md
"""
CONFIGS = Path(__file__).parents[2] / "configs" / "llama2"
POOL_PEAK = re.compile(r"Common mem pool info:.*peak used mem:(\d+)M")
COLUMNS = ("configuration", "rank", "measured MiB", "estimated MiB", "error")


@dataclass(frozen=True)
class Case:
    """One rank of a shipped configuration with changed keys."""

    name: str
    model: str
    rank: int
    changes: Mapping[str, Any]

    @property
    def config(self) -> RunConfig:
        """The configuration it describes."""
        return load_config(CONFIGS / f"pretrain_llama2_{self.model}.yaml", self.changes)


@dataclass(frozen=True)
class Compared:
    """Bytes measured and estimated."""

    name: str
    rank: int
    measured: int
    estimated: int

    @property
    def error(self) -> float:
        """Of the estimate, as a part of what was measured."""
        return self.estimated / self.measured - 1


def _case(name: str, model: str, rank: int, layers: int, dp: int = 1, tp: int = 1, pp: int = 1, **more: Any) -> Case:
    """``more`` holds keys with ``__`` for dots; features that it does not name are off."""
    changes = {
        "model.model_config.num_layers": layers,
        "parallel_config.data_parallel": dp,
        "parallel_config.model_parallel": tp,
        "parallel_config.pipeline_stage": pp,
        "parallel_config.micro_batch_num": 4 if pp > 1 else 1,
        "parallel_config.use_seq_parallel": False,
        "parallel.enable_parallel_optimizer": False,
        "recompute_config.recompute": False,
        "runner_config.gradient_accumulation_steps": 1,
        "use_parallel": dp * tp * pp > 1,
    }
    return Case(name, model, rank, {**changes, **{key.replace("__", "."): value for key, value in more.items()}})


SEQUENCE = {"parallel_config__use_seq_parallel": True}
OPTIMIZER = {"parallel__enable_parallel_optimizer": True}
FULL, SELECT = {"recompute_config__recompute": True}, {"recompute_config__select_recompute": True}
INTERLEAVED = {"model__model_config__pp_interleave_num": 2, "parallel__pipeline_config__pipeline_interleave": True}
SMALL = {
    "model__model_config__hidden_size": 256,
    "model__model_config__num_heads": 8,
    "model__model_config__intermediate_size": 688,
    "model__model_config__seq_length": 256,
    "model__model_config__vocab_size": 1024,
}
CASES = (
    _case("one device", "7b", 0, 2),
    _case("tp2", "7b", 0, 2, tp=2),
    _case("tp4, sequence", "7b", 0, 2, tp=4, **SEQUENCE),
    _case("dp2", "7b", 0, 2, dp=2),
    _case("dp4, optimizer", "7b", 0, 2, dp=4, **OPTIMIZER),
    _case("dp2 tp2, sequence, optimizer", "7b", 0, 2, dp=2, tp=2, **SEQUENCE, **OPTIMIZER),
    _case("pp2, first stage", "7b", 0, 4, pp=2),
    _case("pp2, last stage", "7b", 1, 4, pp=2),
    _case("dp2 pp2, optimizer, full recompute", "13b", 0, 4, dp=2, pp=2, **OPTIMIZER, **FULL),
    _case("tp2 pp2, sequence, select recompute", "13b", 0, 4, tp=2, pp=2, **SEQUENCE, **SELECT),
    _case("tp8 pp4, sequence, second stage", "70b", 8, 8, tp=8, pp=4, **SEQUENCE),
    _case("pp2, interleaved", "7b", 0, 4, pp=2, **INTERLEAVED),
    _case("small, dp2 tp2 pp2, everything", "7b", 6, 4, 2, 2, 2, **SMALL, **SEQUENCE, **OPTIMIZER, **SELECT),
)
ON_CPU = {
    "model.model_config.hidden_size": 512,
    "model.model_config.intermediate_size": 1376,
    "model.model_config.seq_length": 512,
    "runner_config.batch_size": 2,
}
CPU_CASES = (
    Case("4 layers of 512", "tiny", 0, ON_CPU),
    Case("the same, full recompute", "tiny", 0, {**ON_CPU, "recompute_config.recompute": True}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares all cases and shows a table of each kind."""
    parser = CommandParser(
        prog="python -m toolkit.benchmark.liveness",
        description="Compares peak memory estimated from compiled graphs with MindSpore's dry run and its pool on a CPU.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--keep", type=output_directory, metavar="DIR", help="keeps graphs and simulations there, and uses them again"
    )
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="writes the tables as a page")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="writes the figures in bytes")
    options = parser.parse_args(arguments)
    simulated = [_against_simulation(case, options.keep) for case in track(CASES, "Simulating")]
    on_cpu = [_against_pool(case, options.keep) for case in track(CPU_CASES, "On the CPU")]
    tables = (("MindSpore's dry run", simulated), ("MindSpore's memory pool on a CPU", on_cpu))
    for title, rows in tables:
        _show(title, rows)
    if options.markdown:
        pages = [(title, COLUMNS, [_cells(row) for row in rows]) for title, rows in tables]
        write_markdown(options.markdown, "Peak memory from the graph alone", _description(), _command(options), pages)
    if options.json:
        with atomic_open(options.json) as file:
            json.dump({title: [dataclasses.asdict(row) for row in rows] for title, rows in tables}, file, indent=1)
    return 0


def _against_simulation(case: Case, keep: Path | None) -> Compared:
    simulation = _simulation(case, keep)
    return Compared(case.name, case.rank, simulation.used_peak, estimate(_graph(case, keep)).peak)


def _against_pool(case: Case, keep: Path | None) -> Compared:
    """The pool's statistic is in whole MiB."""
    return Compared(case.name, case.rank, _pool_peak(case.config), _made(estimate(_graph(case, keep), on_cpu=True)))


def _made(memory: Liveness) -> int:
    """Peak without parameters."""
    return memory.peak - sum(block.size for block in memory.blocks if block.kind == PARAMETER)


def _graph(case: Case, keep: Path | None) -> CompiledGraph:
    path = _kept(case, keep, "graph")
    if path and path.is_file():
        return load(path)
    graph = compile_rank(case.config, case.rank)
    if path:
        save(graph, path)
    return graph


def _simulation(case: Case, keep: Path | None) -> Simulation:
    path = _kept(case, keep, "simulation")
    if path and path.is_file():
        return load_simulation(path)
    simulation = simulate_rank(case.config, case.rank)
    if path:
        simulation.save(path)
    return simulation


def _kept(case: Case, keep: Path | None, kind: str) -> Path | None:
    return keep / f"{re.sub(r'[^a-z0-9]+', '_', f'{case.model} {case.name}')}.{kind}" if keep else None


def _pool_peak(config: RunConfig) -> int:
    """Bytes in use at the peak of MindSpore's memory pool in one step on the CPU."""
    with tempfile.TemporaryDirectory(prefix="mindllm_liveness_") as name:
        directory = Path(name)
        (directory / "config.yaml").write_text(render_config(config), encoding="utf-8")
        output = run_worker(
            "toolkit.benchmark.workers.liveness",
            ["--config", "config.yaml"],
            directory,
            {"MS_DEV_RUNTIME_CONF": "memory_statistics:True"},
            product="config.yaml",
            doing="a step on the CPU",
            timeout=600,
        )
    return max(int(found) for found in POOL_PEAK.findall(output)) * MIB


def _cells(row: Compared) -> list[str]:
    sizes = (f"{row.measured / MIB:,.0f}", f"{row.estimated / MIB:,.0f}")
    return [row.name, str(row.rank), *sizes, f"{row.error:+.2%}"]


def _show(title: str, rows: Sequence[Compared]) -> None:
    output.print(Table(title, [*texts(COLUMNS[0]), *figures(*COLUMNS[1:])], map(_cells, rows)))


def _description() -> str:
    return (
        "Peak memory of one rank as `mindllm.compiled.graph.liveness` estimates it from the compiled graph, beside the used peak "
        "(without fragments) of MindSpore's own dry run. Llama 2 widths with few layers; `everything` is sequence and optimizer "
        "parallel with selective recomputation.\n\n"
        "What is missing there: what a Send reads on a stream of its own stays until that stream is waited for (the "
        "second stage of the 70B case: two tensors of 8 MiB).\n\n"
        "On a CPU, parameters lie outside the pool and are left out on both sides. There MindSpore also takes operators apart "
        "that the graph holds as one (SiLU becomes Sigmoid and Mul, the gradient of Softmax four operators), and kernels use "
        "workspace; the estimate knows neither."
    )


def _command(options: Any) -> str:
    return f"python -m toolkit.benchmark.liveness --markdown {options.markdown}"


if __name__ == "__main__":
    run_command(main)
