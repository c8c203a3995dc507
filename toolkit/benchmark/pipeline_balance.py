"""How good the plans of ``toolkit.pipeline_balance`` are, and how long they take: random decoders and published ones.

Every row is one problem. The gap is between the plan's simulated step and the proven lower bound of all plans. Seconds are of the
clock and, beside them, of the processor in the planner's own process: on a busy machine the clock runs on, and the planner obeys
the clock. With several chunks a second process proves the bound meanwhile. Load is the mean number of processes that
wanted a core in the minute before a row was done, this one included: others used the machine.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import UserError
from mindllm.planning.problem import Problem, make_problem
from mindllm.planning.read_problem import Setting, read_problem
from mindllm.planning.reports.plan import gap_text
from mindllm.planning.solve import solve
from mindllm.terminal.console import error_console
from toolkit.benchmark.report import write_markdown

EXAMPLES = """example:
  python -m toolkit.benchmark.pipeline_balance --data tests/ground_truth --markdown docs/benchmarks/pipeline_balance.md
"""
COLUMNS = ("problem", "even split", "plan", "lower bound", "gap", "seconds", "processor s", "load", "reference")
ONE_CHUNK = [(16, 192, 8, 64), (32, 200, 8, 128), (64, 200, 8, 512), (64, 200, 8, 256), (8, 200, 8, 32)]
"""Stages, layers, recompute kinds and micro-batches."""
CORNER = [(64, 200, 8, micro) for micro in (2, 16, 64, 96, 128)]
"""Likewise, with no more than twice as many micro-batches as stages."""
CHUNKED = [(16, 2, 64), (16, 3, 64), (16, 4, 64), (16, 4, 128), (16, 3, 16)]
PUBLIC_OPTIMA = [(16, 16, 53_000, 107_460), (16, 32, 53_000, 169_650), (16, 128, 53_000, 532_530), (16, 64, 50_000, 291_330),
                 (8, 32, 60_000, 278_550)]  # fmt: skip
INSTANCES = {"pp16-mb64-4k": 1132.66, "pp8-vp2-mb240-8k": 5661.55, "pp4-vp2-mb120-4k": 5868.49}
TABLES = ("published", "one_chunk", "corner", "chunked", "delays")
LOSING = [(4, 8, 2, (1456, 1279)), (8, 32, 2, (5589, 4929)), (4, 16, 4, (4626, 4779)), (8, 32, 1, (3309, 3129))]


def random_decoder(
    seed: int, stages: int, layers: int, kinds: int, micro_batches: int, chunks: int = 1, layer_kinds: int = 1
) -> Problem:
    """A decoder whose costs, ends and limits vary with the seed."""
    random = np.random.default_rng(seed)
    parts = []
    first = layers // 5 if layer_kinds > 1 else 0
    for name, count, scale in (("dense", first, 0.6), ("body", layers - first, 1.0)):
        if not count:
            continue
        forward, activation = 100 * scale * random.uniform(0.8, 1.2), 1000 * scale * random.uniform(0.8, 1.2)
        backward = forward * random.uniform(1.7, 2.2)
        costs = {"none": {"backward": backward, "activation_mb": activation}}
        costs["full"] = {"backward": backward + forward, "activation_mb": 0.05 * activation}
        for number in range(kinds - 2):
            share = random.uniform(0.05, 0.95)
            again = forward * share**1.5 * random.uniform(0.9, 1.1)
            costs[f"set {number}"] = {"backward": backward + again, "activation_mb": activation * (1 - 0.95 * share)}
        part = {"name": name, "count": count, "forward": forward, "kinds": costs}
        parts.append({**part, "parameter_mb": random.uniform(300, 1500)})
    low, high = layers / stages * (1500 + 50 * stages), layers / stages * (1000 + 1000 * min(micro_batches, stages))
    ends = [{"forward": random.uniform(0, most), "backward": random.uniform(0, 2 * most)} for most in (30, 150)]
    limit = (4000 + low + random.uniform(0.1, 0.8) * (high - low)) * (1 if chunks == 1 else 1.15)
    sizes = {"stages": stages, "chunks": chunks, "micro_batches": micro_batches, "limit_mb": limit}
    return make_problem({**sizes, "layers": parts, "head": ends[0], "tail": ends[1]}, f"random decoder {seed}")


def row(title: str, problem: Problem, seconds: float, reference: str = "") -> tuple[str, ...]:
    """One solved problem."""
    begun = time.process_time()
    try:
        solution = solve(problem, seconds)
    except UserError as error:
        return (title, "does not fit", str(error).removeprefix(f"{problem.name}: "), *[""] * 6)
    processor = time.process_time() - begun
    bound = "none" if solution.lower_bound is None else f"{solution.lower_bound:,.7g}"
    even = f"{solution.even.step_time:,.6g}" if solution.even else "does not fit"
    return (
        title, even, f"{solution.best.step_time:,.7g}", bound, gap_text(solution),
        f"{solution.solve_seconds:.1f}", f"{processor:.1f}", f"{os.getloadavg()[0]:.1f}", reference,
    )  # fmt: skip


def one_chunk(sizes: Sequence[tuple[int, int, int, int]], seeds: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """Random decoders with one chunk per stage."""
    for stages, layers, kinds, micro in sizes:
        for layer_kinds in (1, 2):
            for seed in range(seeds):
                title = (
                    f"{stages} stages, {layers} layers of {layer_kinds} kind(s), {kinds} recompute kinds, {micro} micro"
                )
                yield row(
                    f"{title}, {seed}", random_decoder(seed, stages, layers, kinds, micro, 1, layer_kinds), seconds
                )


def chunked(seeds: int, limits: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Random decoders of 192 layers with several chunks per stage and five recompute kinds, with each time limit."""
    for stages, chunks, micro in CHUNKED:
        for seed, seconds in itertools.product(range(seeds), limits):
            title = f"{stages} stages x {chunks} chunks, 192 layers, 5 recompute kinds, {micro} micro, {seed}"
            yield row(f"{title}; {seconds:g} s", random_decoder(seed, stages, 192, 5, micro, chunks), seconds)


def delays(seeds: int, limits: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """1F1B of random decoders whose tensors take a share of a stage's forward pass between stages."""
    for stages, layers, micro in ((8, 64, 32), (16, 96, 64)):
        for share, seed, seconds in itertools.product((0.1, 0.5, 1.0), range(seeds), limits):
            problem = random_decoder(seed, stages, layers, 5, micro)
            delay = share * 100 * layers / stages
            title = f"{stages} stages, {layers} layers, 5 recompute kinds, {micro} micro, delay {delay:g}, {seed}"
            yield row(f"{title}; {seconds:g} s", problem.model_copy(update={"point_to_point": delay}), seconds)


def published(data: Path, seconds: float) -> Iterator[tuple[str, ...]]:
    """Problems whose optimum or a good plan is published."""
    for stages, micro, limit, optimum in PUBLIC_OPTIMA:
        setting = Setting(stages=stages, micro_batches=micro, limit_mb=limit)
        problem = read_problem(data / "sapp_test_96_layers.json", setting)
        title = f"96 layers, {stages} stages, {micro} micro, {limit / 1000:.0f} GB"
        yield row(title, problem, seconds, f"{optimum:,} (proven)")
    for name, reference in INSTANCES.items():
        problem = read_problem(data / "planner_instances.json", instance=name)
        yield row(name, problem, seconds, f"{reference:,}")
    for stages, micro, chunks, modes in LOSING:
        layer = {"name": "body", "count": 2 * stages * chunks, "forward": 10}
        fields: dict[str, Any] = {"stages": stages, "chunks": chunks, "micro_batches": micro}
        fields["layers"] = [{**layer, "kinds": {"none": {"backward": 20, "activation_mb": 1}}}]
        ends = {"head": {"forward": 3, "backward": 6}, "tail": {"forward": 10, "backward": 20}}
        problem = make_problem({**fields, **ends}, "uniform")
        title = f"uniform layers, {stages} stages x {chunks} chunks, {micro} micro"
        yield row(title, problem, seconds, " and ".join(f"{mode:,}" for mode in modes) + " (SAPP's modes)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Solves everything and prints or writes the tables."""
    parser = CommandParser(prog="python -m toolkit.benchmark.pipeline_balance", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="published problems")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="which (default: all)")
    parser.add_argument("--seeds", type=int, default=2, help="random problems of each size (default: %(default)s)")
    parser.add_argument("--few", type=int, metavar="SEEDS", help="likewise of several chunks and delays")
    help_text = "for a problem; of several the chunked table has all, delays the first, others the last"
    parser.add_argument("--seconds", type=float, nargs="+", default=[60.0], help=help_text)
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="page to write")
    options = parser.parse_args(arguments)
    if not (options.data / "planner_instances.json").is_file():
        raise UserError(f"--data {options.data}: planner_instances.json is missing")
    few, seconds = options.few or options.seeds, options.seconds[-1]
    makers = {
        "published": ("Published problems", COLUMNS, lambda: published(options.data, seconds)),
        "one_chunk": ("One chunk per stage", COLUMNS, lambda: one_chunk(ONE_CHUNK, options.seeds, seconds)),
        "corner": ("Few micro-batches", COLUMNS, lambda: one_chunk(CORNER, options.seeds, seconds)),
        "chunked": ("Several chunks per stage", COLUMNS, lambda: chunked(few, options.seconds)),
        "delays": ("1F1B with delays", COLUMNS, lambda: delays(few, options.seconds[:1])),
    }
    tables = [(title, columns, _collect(rows())) for title, columns, rows in map(makers.__getitem__, options.tables)]
    command = "python -m toolkit.benchmark.pipeline_balance " + " ".join(arguments or sys.argv[1:])
    if options.markdown:
        write_markdown(options.markdown, "Plans and their proofs", __doc__ or "", command, tables)
    return 0


def _collect(rows: Iterator[tuple[str, ...]]) -> list[tuple[str, ...]]:
    found = []
    for one in rows:
        error_console.print(" | ".join(one))
        found.append(one)
    return found


if __name__ == "__main__":
    run_command(main)
