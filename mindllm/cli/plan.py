"""Plans pipeline stages, interleaving and recomputation: the fastest plan that fits the memory, and a bound no plan can beat."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindllm.cli.parsers.plan import OF_CONFIG, make_parser
from mindllm.command import run_command
from mindllm.config import RunConfig, load_config
from mindllm.config.yaml_tree import write_yaml
from mindllm.console import error_console, output, print_json
from mindllm.errors import CheckFailed, UserError
from mindllm.files import UNITS, atomic_open, size_in_bytes
from mindllm.planning.problem import Problem
from mindllm.planning.read_problem import Setting, read_problem
from mindllm.planning.reports.picture import FORMATS, draw_schedule
from mindllm.planning.yaml_plan import KEYS, YamlPlan, write_plan
from mindllm.timing.device import DEFAULT, read_device

if TYPE_CHECKING:  # the solvers, and what simulates: imported where a plan is made, not to print --help
    from rich.console import Console

    from mindllm.dry_run.simulations import Simulations
    from mindllm.planning.costs.configured import Configured
    from mindllm.planning.costs.measured import Fit
    from mindllm.planning.from_programs.simulated_costs import SimulatedFit
    from mindllm.planning.plan import Evaluation
    from mindllm.planning.solve import Solution
    from mindllm.planning.validate import Validated


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads a problem, plans it, and writes what was asked for."""
    options, overrides = make_parser().parse_known_args(arguments)
    _check(options, overrides)
    console = error_console if options.json else output
    simulations = configured = fit = found = run = before = None
    if options.formula:
        run, problems, before = _by_formula(options, overrides)
    elif options.config is not None:
        simulations, configured = _configured(options, overrides)
        run, problems, before = configured.config, [configured.problem], configured.as_it_is()
    elif options.simulated:
        problems, found = _simulated(options)
    else:
        problems, fit = _problems(options)
    from mindllm.planning.solve import Infeasible

    if not options.json:
        _print_origin(console, configured, fit)
        if found is not None:
            from mindllm.planning.reports.simulated import print_simulated

            print_simulated(console, problems[0], found)
    if options.manual:
        return _manual(options, problems[0], console)
    if configured and simulations:
        try:
            solution, validated = _plan_run(options, configured, simulations, console)
        except Infeasible as error:
            raise configured.infeasible(error) from None
    else:
        solution, validated = _plan_problems(options, problems, console), None
    _print(options, console, solution, validated, found, before)
    _write(options, solution, run, console, before)
    if options.explain:
        from mindllm.planning.explain import explain, lines

        for line in lines(solution, explain(solution, options.seconds)):
            console.print(line)
    return 0


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    if options.config is not None:
        for name in ("stages", "micro_batches", "schedule"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"--{name}: a run says this itself; change the key of the YAML, as --parallel_config.micro_batch_num=64"
                )
    else:
        if options.validate:
            raise UserError("--validate: belongs to --config RUN.yaml, which is not given")
        if options.device and not options.simulated:
            raise UserError("--device: belongs to --config RUN.yaml or --simulated DIR, which are not given")
        if overrides:
            raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
        if options.apply == OF_CONFIG:
            raise UserError("--apply: needs a RUN.yaml, or --config")
    if options.formula and (options.config is None or options.validate):
        with_what = "--validate, which corrects costs of small runs" if options.validate else "no --config RUN.yaml"
        raise UserError(f"--formula: does not go with {with_what}")
    if options.layers and not options.simulated:
        raise UserError("--layers: belongs to --simulated DIR, which is not given")
    if options.simulated and options.apply:
        raise UserError("--apply: writes a run of mindllm; --yaml FILE writes the keys for the program's own YAML")
    if not 0 < options.seconds < math.inf:
        raise UserError(f"--seconds {options.seconds}: must be a number above 0")
    if bool(options.apply) != bool(options.output):
        raise UserError("--apply RUN.yaml and --output FILE go together")
    if options.instance and not options.problem:
        raise UserError(f"--instance {options.instance}: picks from the file of --problem, which is not given")
    if options.picture and options.picture.suffix not in FORMATS:
        raise UserError(f"--picture {options.picture}: must end in {', '.join(FORMATS)}")
    if options.manual and len(options.interleave or ()) > 1:
        raise UserError("--manual judges plans of one number of chunks: give --interleave one number")
    if options.manual and (options.yaml or options.apply or options.explain):
        raise UserError("--manual judges plans and makes none: leave out --yaml, --apply and --explain")


def _problems(options: argparse.Namespace) -> tuple[list[Problem], Fit | None]:
    """The problem, for every number of chunks that is asked for, and how well measurements are explained."""
    limit = options.max_memory and size_in_bytes(options.max_memory) / UNITS["MB"]
    from mindllm.planning.costs.measured import read_measured

    problems, fit = list[Problem](), None
    for chunks in dict.fromkeys(options.interleave or [None]):
        setting = Setting(options.stages, chunks, options.micro_batches, options.schedule, limit)
        if options.problem is not None:
            problems.append(read_problem(options.problem, setting, options.instance))
        else:
            from mindllm.planning.costs.measured import read_measured

            problem, fit = read_measured(options.measured, setting)
            problems.append(problem)
    return problems, fit


def _simulated(options: argparse.Namespace) -> tuple[list[Problem], SimulatedFit]:
    """The problem of simulated runs, for every number of chunks that is asked for."""
    from mindllm.planning.from_programs.simulated import read_simulated
    from mindllm.planning.from_programs.simulated_costs import simulated_problem

    limit = options.max_memory and size_in_bytes(options.max_memory) / UNITS["MB"]
    runs = read_simulated(options.simulated, read_device(options.device or DEFAULT))
    found = [
        simulated_problem(
            runs, Setting(options.stages, chunks, options.micro_batches, options.schedule, limit), options.layers
        )
        for chunks in dict.fromkeys(options.interleave or [None])
    ]
    return [problem for problem, _ in found], found[0][1]


def _plan_problems(options: argparse.Namespace, problems: list[Problem], console: Console) -> Solution:
    """The plan of the problem, of the fastest number of chunks."""
    from mindllm.planning.chunk_numbers import fastest, print_interleaves, try_problems
    from mindllm.planning.solve import solve

    if len(problems) == 1:
        return solve(problems[0], options.seconds)
    tried = try_problems(problems, options.seconds)
    print_interleaves(console, tried)
    solution = fastest(tried).solution
    assert solution is not None
    return solution


def _configured(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[Simulations, Configured]:
    config, device = load_config(options.config, overrides), read_device(options.device or DEFAULT)
    from mindllm.dry_run.simulations import Simulations, can_simulate
    from mindllm.planning.costs.configured import configured_problem, with_memory

    simulations = Simulations(None, error_console, estimates=not can_simulate())
    return simulations, configured_problem(with_memory(config, options.max_memory), device, simulations)


def _by_formula(options: argparse.Namespace, overrides: Sequence[str]) -> tuple[RunConfig, list[Problem], Evaluation]:
    """The run, its problem for every number of chunks that is asked for, and how it is without a plan."""
    from mindllm.planning.costs.by_formula import formula_as_it_is, formula_problems
    from mindllm.planning.costs.configured import with_memory

    config = with_memory(load_config(options.config, overrides), options.max_memory)
    device = read_device(options.device or DEFAULT)
    return config, formula_problems(config, device, options.interleave), formula_as_it_is(config, device)


def _plan_run(
    options: argparse.Namespace, configured: Configured, simulations: Simulations, console: Console
) -> tuple[Solution, Validated | None]:
    """The plan of a run, of the fastest number of chunks, and how it was confirmed."""
    from mindllm.planning.chunk_numbers import fastest, print_interleaves, try_interleaves
    from mindllm.planning.solve import solve
    from mindllm.planning.validate import validate

    solution = None
    if options.interleave:
        tried = try_interleaves(configured, options.interleave, options.seconds)
        print_interleaves(console, tried)
        chosen = fastest(tried)
        configured, solution = chosen.configured or configured, chosen.solution
    if not options.validate:
        return solution or solve(configured.problem, options.seconds), None
    validated = validate(configured, options.seconds, simulations)
    return validated.chosen.solution, validated


def _print_origin(console: Console, configured: Configured | None, fit: Fit | None) -> None:
    from mindllm.planning.reports.costs import print_costs
    from mindllm.planning.reports.plan import print_fit

    if configured is not None:
        print_costs(console, configured)
    if fit is not None:
        print_fit(console, fit)


def _print(
    options: argparse.Namespace,
    console: Console,
    solution: Solution,
    validated: Validated | None,
    found: SimulatedFit | None,
    before: Evaluation | None,
) -> None:
    from mindllm.planning.costs.as_it_is import NAME, tree
    from mindllm.planning.reports.costs import print_validated, validated_answer
    from mindllm.planning.reports.plan import answer, print_solution

    if options.json:
        from mindllm.planning.reports.simulated import simulated_answer

        further = {**(validated_answer(validated) if validated else {}), **(simulated_answer(found) if found else {})}
        of_yaml = tree(solution.best, before) if options.config else {}
        print_json({**answer(solution), **of_yaml, **further})
        return
    if validated:
        print_validated(console, validated)
    print_solution(console, solution, before)
    if options.config and not before:
        console.print(f"{NAME} recomputes in a way that plans do not offer: its step is not known")


def _manual(options: argparse.Namespace, problem: Problem, console: Console) -> int:
    from mindllm.planning.manual import evaluate_manual
    from mindllm.planning.reports.plan import manual_answer, print_manual

    plans = evaluate_manual(problem, options.manual)
    if options.json:
        print_json({name: manual_answer(evaluation) for name, evaluation in plans.items()})
    else:
        print_manual(console, plans)
    if options.picture:
        draw_schedule(min(plans.values(), key=lambda evaluation: evaluation.step_time), options.picture)
    if not any(evaluation.fits for evaluation in plans.values()):
        raise CheckFailed("none of the manual plans fits the memory")
    return 0


def _write(
    options: argparse.Namespace,
    solution: Solution,
    run: RunConfig | None,
    console: Console,
    before: Evaluation | None,
) -> None:
    from mindllm.planning.costs.as_it_is import compared

    best = solution.best
    told = compared(best, before) if before else ""
    if options.picture:
        draw_schedule(best, options.picture, told)
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
            file.write(write_yaml(_keys(options, best, written)))
        console.print(f"wrote {options.yaml}")
    if options.apply:
        from mindllm.planning.validate import planned_config, write_run

        if options.apply == OF_CONFIG and run:
            planned = planned_config(run, best.problem, best.plan)
        else:
            planned = load_config(options.apply, written.overrides(best.problem))
        write_run(options.output, planned)
        console.print(f"wrote {options.output}{f': {told}' if told else ''}")


def _keys(options: argparse.Namespace, best: Evaluation, written: YamlPlan) -> dict[str, Any]:
    """What --yaml writes: the lists, or where they stand in a YAML of MindFormers."""
    if not options.simulated:
        return {key: getattr(written, key) for key in ("offset", *KEYS)}
    from mindllm.planning.reports.simulated import mindformers_keys

    return mindformers_keys(best, written)


if __name__ == "__main__":
    run_command(main)
