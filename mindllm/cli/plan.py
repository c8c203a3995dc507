"""``mindllm plan``: stages, chunks and recomputation to a proven bound."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, output_file, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.files import atomic_open, size_in_bytes
from mindllm.jobs.memory import add_memory_option
from mindllm.terminal.console import PlainConsole, error_console, output, print_json
from mindllm.terminal.render import drawn
from mindllm.timing.shipped import DEFAULT
from mindllm.units import device_mebibytes

if TYPE_CHECKING:
    from mindllm.planning.outcome import PipelinePlan
    from mindllm.planning.subject import Subject
    from mindllm.results import Part

EXAMPLES = """example:
  %(prog)s run.yaml --max_memory 58GB --apply --output planned.yaml
  %(prog)s run.yaml --device my_device.yaml --parallel_config.micro_batch_num=64
  %(prog)s run.yaml --interleave 1 2 4 --apply --output planned.yaml
  %(prog)s run.yaml --no-validate --interleave 1 2 --yaml plan.yaml
  %(prog)s --problem problem.json --picture schedule.png
  %(prog)s --problem layers.json --stages 16 --micro_batches 32 --max_memory 53GB --explain
  %(prog)s --measured init.yaml --micro_batches 64 --max_memory 58GB --json
  %(prog)s --problem problem.json --apply run.yaml --output planned.yaml
"""
SCHEDULES = ("1f1b", "less_memory", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v")
"""Of mindllm.planning.problem."""
FORMATS = (".png", ".svg", ".html")  # of mindllm.planning.reports.picture
DESCRIPTION = (
    "Plans pipeline stages, interleaving and recomputation: the fastest plan that fits the memory, and a bound no plan can "
    "beat. Exit code 0: planned, 3: no plan fits the memory, 2: wrong input."
)
OF_CONFIG = Path()  # --apply without a file: the run of --config


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(prog="mindllm plan", takes_keys=True, description=DESCRIPTION, epilog=EXAMPLES)
    _add_subject(parser)
    _add_settings(parser)
    _add_planning(parser)
    _add_written(parser)
    return parser


def _add_subject(parser: CommandParser) -> None:
    """Add what is planned."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--config",
        metavar="RUN.yaml",
        help="a run, with costs from its architecture; additional options are its keys; --config may be left out",
    )
    source.add_argument("--problem", type=Path, metavar="FILE", help="a problem as JSON, or a layer file of SAPP")
    source.add_argument(
        "--measured", type=Path, nargs="+", metavar="FILE", help="init YAMLs and a layer file of SAPP, as measured"
    )
    parser.add_argument("--formula", action="store_true", help=argparse.SUPPRESS)  # deprecated: has no effect
    parser.add_argument(
        "--swap",
        action="store_true",
        help="of --config: also choose the layers whose attention waits on the host (swap_config)",
    )


def _add_settings(parser: CommandParser) -> None:
    """Add what a file may leave open."""
    given = parser.add_argument_group("what the file does not say, or says otherwise")
    given.add_argument("--instance", metavar="NAME", help="one of the instances that the file of --problem holds")
    given.add_argument("--stages", type=_positive, metavar="N")
    given.add_argument(
        "--interleave",
        "--chunks",
        type=_positive,
        nargs="+",
        metavar="N",
        help="chunks per stage (pp_interleave_num); of several numbers the fastest is taken",
    )
    given.add_argument("--micro_batches", type=_positive, metavar="N")
    given.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="1f1b is interleaved if there are chunks; zero_bubble_v is MindSpore's V",
    )
    given.add_argument("--max_memory", type=_size, metavar="SIZE", help="of every stage: 58GB, 58000MB")


def _add_planning(parser: CommandParser) -> None:
    """Add how it is planned, and what is told beside the plan."""
    parser.add_argument(
        "--device", metavar="FILE", help=f"what the device of a run can do: a YAML or a name (default: {DEFAULT})"
    )
    parser.add_argument(
        "--validate",
        action=argparse.BooleanOptionalAction,
        help="dry-run the plan of --config, and correct it until confirmed (default: yes)",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="to plan in, at most about (default: %(default)s)")
    parser.add_argument("--manual", type=Path, metavar="FILE", help="judge the plans of this YAML instead of planning")
    parser.add_argument("--explain", action="store_true", help="which constraint binds, and what one more GB would buy")
    add_memory_option(parser)
    parser.add_argument("--json", action="store_true", help="the answer as JSON")


def _add_written(parser: CommandParser) -> None:
    """Add the files that a plan is written to."""
    parser.add_argument("--yaml", type=output_file, metavar="FILE", help="write offset and recompute lists")
    parser.add_argument(
        "--torch_csv",
        type=output_file,
        metavar="FILE",
        help="write the order of passes as torchtitan's pipeline_parallel_schedule_csv has it",
    )
    parser.add_argument(
        "--megatron", type=output_file, metavar="FILE", help="write the split as options of Megatron-LM"
    )
    parser.add_argument(
        "--apply",
        type=Path,
        nargs="?",
        const=OF_CONFIG,
        metavar="RUN.yaml",
        help="the run to write with the plan in it",
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="YAML file that --apply writes")
    parser.add_argument("--picture", type=output_file, metavar="FILE", help=f"draw the schedule: {', '.join(FORMATS)}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _size(text: str) -> str:
    try:
        size_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads a problem, plans it, and writes what was asked for."""
    options, overrides = make_parser().parse_known_args(arguments)
    _check(options, overrides)
    if options.formula:
        error_console.print("--formula is deprecated: all plans use formula costs; --no-validate skips the dry run")
    validates = options.validate
    if validates is None:
        validates = bool(options.apply or options.config) and not options.manual
    console = error_console if options.json else output
    subject = _subject(options, overrides, validates)
    if not options.json:
        _print(subject.parts(), console)
    if options.manual:
        return _manual(options, subject, console)
    from mindllm.planning.outcome import make_plan

    with drawn(transient=subject.simulations is None) as progress:
        if subject.simulations:
            subject.simulations.progress = progress
        progress("planning", 0, 1)
        planned = make_plan(subject, options.seconds, validates)
        progress("planning", 1, 1)
    _print(planned.choice(), console)
    if options.json:
        print_json(planned.to_dict())
    else:
        _print(planned.answer(), console)
    _write(options, planned, console, validates)
    if options.explain:
        with drawn() as progress:
            progress("planning again with more memory", 0, 1)
            explanation = planned.explain(options.seconds)
        _print(explanation, console)
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
            raise UserError("--validate requires --config RUN.yaml")
        for name in ("device", "swap"):
            if getattr(options, name):
                raise UserError(f"--{name} requires --config RUN.yaml")
        if overrides:
            raise UserError(f"{overrides[0]}: no such option; keys of a run go with --config")
        if options.apply == OF_CONFIG:
            raise UserError("--apply: needs a RUN.yaml, or --config")
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


def _subject(options: argparse.Namespace, overrides: Sequence[str], validates: bool) -> Subject:
    """Return what the options plan, with the dry runs that validate it."""
    from mindllm.config import load_config
    from mindllm.planning import subject
    from mindllm.planning.read_problem import Setting
    from mindllm.timing.device import read_device

    if options.config is not None:
        config, device = load_config(options.config, overrides), read_device(options.device or DEFAULT)
        simulations = None
        if validates and config.context.device_target == "Ascend":
            from mindllm.dry_run.simulations import simulations_here

            simulations = simulations_here()
        return subject.from_run(config, device, options.interleave, options.max_memory, options.swap, simulations)
    limit = options.max_memory and device_mebibytes(options.max_memory)
    settings = [
        Setting(options.stages, chunks, options.micro_batches, options.schedule, limit)
        for chunks in dict.fromkeys(options.interleave or [None])
    ]
    if options.problem is not None:
        return subject.from_file(options.problem, settings, options.instance)
    return subject.from_measurements(options.measured, settings)


def _print(parts: Iterable[Part], console: PlainConsole) -> None:
    for part in parts:
        console.print(part)


def _manual(options: argparse.Namespace, subject: Subject, console: PlainConsole) -> int:
    """Judge plans that a person wrote."""
    from mindllm.planning.reports.picture import draw_schedule
    from mindllm.planning.reports.plan import manual_answer, manual_parts
    from mindllm.planning.yaml_plan import evaluate_manual

    with drawn() as progress:
        progress("judging plans", 0, 1)
        plans = {
            name: subject.predict_step(plan)
            for name, plan in evaluate_manual(subject.problems[0], options.manual).items()
        }
    if options.json:
        print_json({"plans": {name: manual_answer(evaluation) for name, evaluation in plans.items()}})
    else:
        _print(manual_parts(plans), console)
    if options.picture:
        draw_schedule(min(plans.values(), key=lambda evaluation: evaluation.reported_step), options.picture)
    if not any(evaluation.fits for evaluation in plans.values()):
        raise CheckFailed("none of the manual plans fits the memory")
    return 0


def _write(options: argparse.Namespace, planned: PipelinePlan, console: PlainConsole, validates: bool) -> None:
    """Write the files that were asked for."""
    from mindllm.config.reading.yaml_tree import write_yaml

    if options.picture:
        with drawn() as progress:
            progress(f"drawing {options.picture}", 0, 1)
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
    if options.apply:
        _apply(options, planned, console, validates)


def _apply(options: argparse.Namespace, planned: PipelinePlan, console: PlainConsole, validates: bool) -> None:
    """Write the run with the plan in it, and say whether a dry run confirmed that it fits."""
    from mindllm.config import load_config
    from mindllm.planning.validate import check_fits, write_run
    from mindllm.recipes.spare_files import forget_spares, say_forgotten

    if options.apply == OF_CONFIG and planned.subject.run:
        run = planned.config
    else:
        run = load_config(options.apply, planned.written.overrides(planned.best.problem))
    simulated = run.context.device_target == "Ascend"
    if planned.validated is None and validates and simulated:
        from mindllm.dry_run.simulations import simulations_here

        with drawn(transient=False) as progress:
            check_fits(run, simulations_here(progress=progress))
    write_run(options.output, run)
    gain = f": {planned.gain}" if planned.gain else ""
    console.print(f"wrote {options.output}{gain}; {_standing(validates, simulated)}")
    if said := say_forgotten(options.output, forget_spares(options.output)):
        error_console.print(said)


def _standing(validates: bool, simulated: bool) -> str:
    """Return whether the dry run confirmed a plan, and if not, why."""
    if not validates:
        return "not validated by a dry run (--no-validate)"
    if not simulated:
        return "not validated: MindSpore's dry run is of Ascend devices (context.device_target)"
    return "validated by the dry run"


if __name__ == "__main__":
    run_command(main)
