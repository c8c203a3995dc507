"""Plans pipeline stages, interleaving and recomputation: the fastest plan that fits the memory, and a bound no plan can beat."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mindllm.cli.parsers.plan import OF_CONFIG, make_parser
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.config.reading.yaml_tree import write_yaml
from mindllm.errors import CheckFailed, UserError
from mindllm.files import atomic_open
from mindllm.planning.problem import Problem
from mindllm.planning.read_problem import Setting
from mindllm.planning.reports.picture import FORMATS, draw_schedule
from mindllm.terminal.console import PlainConsole, error_console, output, print_json
from mindllm.terminal.render import drawn
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import device_mebibytes

if TYPE_CHECKING:  # the solvers, and what simulates: imported where a plan is made, not to print --help
    from mindllm.planning.outcome import PipelinePlan
    from mindllm.planning.subject import Subject
    from mindllm.results import Part


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads a problem, plans it, and writes what was asked for."""
    options, overrides = make_parser().parse_known_args(arguments)
    _check(options, overrides)
    console = error_console if options.json else output
    subject = _subject(options, overrides)
    if not options.json:
        _print(subject.parts(), console)
    if options.apply:
        from mindllm.planning.yaml_plan import check_trained

        check_trained(subject.problems[0])
    if options.manual:
        return _manual(options, subject.problems[0], console)
    from mindllm.planning.outcome import make_plan

    interleave = options.interleave if subject.configured else None
    with drawn(transient=False) as progress:
        if subject.simulations:
            subject.simulations.progress = progress
        planned = make_plan(subject, options.seconds, interleave, options.validate)
    _print(planned.choice(), console)
    if options.json:
        print_json(planned.to_dict())
    else:
        _print(planned.answer(), console)
    _write(options, planned, console)
    if options.explain:
        _print(planned.explain(options.seconds), console)
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
    if options.swap and not options.formula:
        raise UserError("--swap: small runs have no costs of it; give --config RUN.yaml --formula")
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
    if options.manual and any((options.yaml, options.apply, options.explain, options.torch_csv, options.megatron)):
        raise UserError(
            "--manual judges plans and makes none: leave out --yaml, --torch_csv, --megatron, --apply and --explain"
        )


def _subject(options: argparse.Namespace, overrides: Sequence[str]) -> Subject:
    """What the options say is planned."""
    from mindllm.planning import subject

    if options.config is not None:
        config, device = load_config(options.config, overrides), read_device(options.device or DEFAULT)
        if options.formula:
            return subject.of_architecture(config, device, options.interleave, options.max_memory, options.swap)
        from mindllm.dry_run.simulations import simulations_here

        with drawn(transient=False) as progress:
            return subject.of_run(config, device, simulations_here(progress=progress), options.max_memory)
    limit = options.max_memory and device_mebibytes(options.max_memory)
    settings = [
        Setting(options.stages, chunks, options.micro_batches, options.schedule, limit)
        for chunks in dict.fromkeys(options.interleave or [None])
    ]
    if options.simulated:
        device = read_device(options.device or DEFAULT)
        with drawn() as progress:
            return subject.of_programs(options.simulated, device, settings, options.layers, progress)
    if options.problem is not None:
        return subject.of_problem(options.problem, settings, options.instance)
    return subject.of_measurements(options.measured, settings)


def _print(parts: Iterable[Part], console: PlainConsole) -> None:
    for part in parts:
        console.print(part)


def _manual(options: argparse.Namespace, problem: Problem, console: PlainConsole) -> int:
    from mindllm.planning.manual import evaluate_manual
    from mindllm.planning.reports.plan import manual_answer, manual_parts

    plans = evaluate_manual(problem, options.manual)
    if options.json:
        print_json({"plans": {name: manual_answer(evaluation) for name, evaluation in plans.items()}})
    else:
        _print(manual_parts(plans), console)
    if options.picture:
        draw_schedule(min(plans.values(), key=lambda evaluation: evaluation.step_time), options.picture)
    if not any(evaluation.fits for evaluation in plans.values()):
        raise CheckFailed("none of the manual plans fits the memory")
    return 0


def _write(options: argparse.Namespace, planned: PipelinePlan, console: PlainConsole) -> None:
    if options.picture:
        planned.draw(options.picture)
        console.print(f"wrote {options.picture}")
    if options.yaml:
        with atomic_open(options.yaml) as file:
            file.write(write_yaml(planned.keys))
        console.print(f"wrote {options.yaml}")
    for path, name in ((options.torch_csv, "torch_schedule"), (options.megatron, "megatron_options")):
        if path:
            with atomic_open(path) as file:
                file.write(getattr(planned, name))
            console.print(f"wrote {path}")
    if not options.apply:
        return
    if options.apply == OF_CONFIG and planned.subject.run:
        planned.write(options.output)
    else:
        from mindllm.planning.validate import write_run

        write_run(options.output, load_config(options.apply, planned.written.overrides(planned.best.problem)))
    console.print(f"wrote {options.output}{f': {planned.gain}' if planned.gain else ''}")


if __name__ == "__main__":
    run_command(main)
