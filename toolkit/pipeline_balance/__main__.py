"""Plans pipeline stages, interleaving and recomputation: the fastest plan that fits the memory, and a bound no plan can beat."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from mindllm.command import CommandParser, run_command
from mindllm.config import load_config, render_config
from mindllm.config.yaml_tree import write_yaml
from mindllm.errors import CheckFailed, UserError
from mindllm.files import UNITS, atomic_open, size_in_bytes
from toolkit.pipeline_balance.explain import explain, lines
from toolkit.pipeline_balance.manual import evaluate_manual
from toolkit.pipeline_balance.measured import Fit, read_measured
from toolkit.pipeline_balance.picture import FORMATS, draw_schedule
from toolkit.pipeline_balance.problem import Problem, Schedule
from toolkit.pipeline_balance.read_problem import Setting, read_problem
from toolkit.pipeline_balance.report import answer, manual_answer, print_fit, print_manual, print_solution
from toolkit.pipeline_balance.solve import Solution, solve
from toolkit.pipeline_balance.yaml_plan import KEYS, write_plan

EXAMPLES = """example:
  python -m toolkit.pipeline_balance --problem problem.json --picture schedule.png
  python -m toolkit.pipeline_balance --problem layers.json --stages 16 --micro_batches 32 --max_memory 53GB --explain
  python -m toolkit.pipeline_balance --measured init.yaml --micro_batches 64 --max_memory 58GB --json
  python -m toolkit.pipeline_balance --problem problem.json --apply run.yaml --output planned.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads a problem, plans it, and writes what was asked for."""
    options = _parser().parse_args(arguments)
    _check(options)
    console = Console(stderr=True) if options.json else Console()
    problem, fit = _problem(options)
    if fit is not None and not options.json:
        print_fit(console, fit)
    if options.manual:
        return _manual(options, problem, console)
    solution = solve(problem, options.seconds)
    if options.json:
        print(json.dumps(answer(solution)))
    else:
        print_solution(console, solution)
    _write(options, solution, console)
    if options.explain:
        for line in lines(solution, explain(solution, options.seconds)):
            console.print(line, highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m toolkit.pipeline_balance", description=__doc__, epilog=EXAMPLES)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--problem", type=Path, metavar="FILE", help="a problem as JSON, or a layer file of SAPP")
    source.add_argument(
        "--measured", type=Path, nargs="+", metavar="FILE", help="init YAMLs and a layer file of SAPP, as measured"
    )
    given = parser.add_argument_group("what the file does not say, or says otherwise")
    given.add_argument("--instance", metavar="NAME", help="one of the instances that the file of --problem holds")
    given.add_argument("--stages", type=_positive, metavar="N")
    given.add_argument("--chunks", type=_positive, metavar="N", help="chunks per stage (pp_interleave_num)")
    given.add_argument("--micro_batches", type=_positive, metavar="N")
    given.add_argument("--schedule", choices=get_args(Schedule), help="1f1b is interleaved where there are chunks")
    given.add_argument("--max_memory", type=_megabytes, metavar="SIZE", help="of every stage: 58GB, 58000MB")
    parser.add_argument("--seconds", type=float, default=60.0, help="to plan in, at most about (default: %(default)s)")
    parser.add_argument("--manual", type=Path, metavar="FILE", help="judge the plans of this YAML instead of planning")
    parser.add_argument("--explain", action="store_true", help="which constraint binds, and what one more GB would buy")
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument("--yaml", type=Path, metavar="FILE", help="write offset and recompute lists")
    parser.add_argument("--apply", type=Path, metavar="RUN.yaml", help="the run to write with the plan in it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where --apply writes")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"draw the schedule: {', '.join(FORMATS)}")
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.seconds <= 0:
        raise UserError(f"--seconds {options.seconds}: must be above 0")
    if bool(options.apply) != bool(options.output):
        raise UserError("--apply RUN.yaml and --output FILE go together")
    if options.instance and not options.problem:
        raise UserError(f"--instance {options.instance}: picks from the file of --problem, which is not given")
    if options.picture and options.picture.suffix not in FORMATS:
        raise UserError(f"--picture {options.picture}: must end in {', '.join(FORMATS)}")
    if options.manual and (options.yaml or options.apply or options.explain):
        raise UserError("--manual judges plans and makes none: leave out --yaml, --apply and --explain")


def _problem(options: argparse.Namespace) -> tuple[Problem, Fit | None]:
    setting = Setting(options.stages, options.chunks, options.micro_batches, options.schedule, options.max_memory)
    if options.problem:
        return read_problem(options.problem, setting, options.instance), None
    return read_measured(options.measured, setting)


def _manual(options: argparse.Namespace, problem: Problem, console: Console) -> int:
    plans = evaluate_manual(problem, options.manual)
    if options.json:
        print(json.dumps({name: manual_answer(evaluation) for name, evaluation in plans.items()}))
    else:
        print_manual(console, plans)
    if options.picture:
        draw_schedule(min(plans.values(), key=lambda evaluation: evaluation.step_time), options.picture)
    if not any(evaluation.fits for evaluation in plans.values()):
        raise CheckFailed("none of the manual plans fits the memory")
    return 0


def _write(options: argparse.Namespace, solution: Solution, console: Console) -> None:
    best = solution.best
    if options.picture:
        draw_schedule(best, options.picture)
        console.print(f"wrote {options.picture}")
    if not (options.yaml or options.apply):
        return
    written = write_plan(best.problem, best.plan)
    if written is None:
        raise UserError(
            f"kinds {', '.join(best.problem.kind_names)} have no YAML form; give recompute_kinds in the problem"
        )
    if options.yaml:
        with atomic_open(options.yaml) as file:
            file.write(write_yaml({key: getattr(written, key) for key in ("offset", *KEYS)}))
        console.print(f"wrote {options.yaml}")
    if options.apply:
        planned = load_config(options.apply, written.overrides(best.problem))
        with atomic_open(options.output) as file:
            file.write(render_config(planned))
        console.print(f"wrote {options.output}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _megabytes(text: str) -> float:
    try:
        return size_in_bytes(text) / UNITS["MB"]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    run_command(main)
