"""``mindllm plan``: optimal pipeline stages, chunks and recomputation."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.command import CommandParser, file_size, output_file, positive, positive_number, run_command
from mindllm.errors import CheckFailed, UserError
from mindllm.files import atomic_open
from mindllm.jobs.memory import add_memory_option
from mindllm.terminal.console import PlainConsole, error_console, output, print_json
from mindllm.terminal.render import drawn
from mindllm.timing.shipped import DEFAULT
from mindllm.units import device_mebibytes

if TYPE_CHECKING:
    from mindllm.planning.outcome import PipelinePlan
    from mindllm.planning.subject import Subject
    from mindllm.results import Part

EXAMPLES = """examples:
  %(prog)s run.yaml --max-memory 58GB --apply --output planned.yaml
  %(prog)s run.yaml --device my_device.yaml --parallel_config.micro_batch_num=64
  %(prog)s run.yaml --interleave 1 2 4 --apply --output planned.yaml
  %(prog)s run.yaml --no-validate --interleave 1 2 --yaml plan.yaml
  %(prog)s --problem problem.json --picture schedule.png
  %(prog)s --problem layers.json --stages 16 --micro-batches 32 --max-memory 53GB --explain
  %(prog)s --measured init.yaml --micro-batches 64 --max-memory 58GB --json
  %(prog)s --problem problem.json --apply run.yaml --output planned.yaml

Exit codes: 0 planned, 3 no plan fits the memory, 2 invalid input.
"""
SCHEDULES = ("1f1b", "less_memory", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v")
"""Those of mindllm.planning.problem."""
FORMATS = (".png", ".svg", ".html")  # those of mindllm.planning.reports.picture
PLANNED_RUN = Path()  # value of --apply without a file: the run that is planned


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm plan",
        takes_keys=True,
        description="Plans pipeline stages, interleaving and recomputation: the fastest plan that fits the memory, and a lower "
        "bound for the step time of all plans.",
        epilog=EXAMPLES,
    )
    _add_subject_options(parser)
    _add_planning_options(parser)
    _add_output_options(parser)
    return parser


def _add_subject_options(parser: CommandParser) -> None:
    subject = parser.add_mutually_exclusive_group(required=True)
    parser.add_run("YAML of a run, or a Hugging Face directory; costs are estimated from its architecture", subject)
    subject.add_argument("--problem", type=Path, metavar="FILE", help="problem as JSON, or layer file of SAPP")
    measured = "measured costs: init YAMLs and layer file of SAPP"
    subject.add_argument("--measured", type=Path, nargs="+", metavar="FILE", help=measured)
    add = parser.add_argument_group("settings that a file omits, or to replace").add_argument
    add("--instance", metavar="NAME", help="instance in the file of --problem")
    add("--stages", type=positive, metavar="N", help="pipeline stages")
    chunks = "chunks per stage (pp_interleave_num); the fastest of several counts is chosen"
    add("--interleave", "--chunks", type=positive, nargs="+", metavar="N", help=chunks)
    add("--micro-batches", type=positive, metavar="N", help="micro-batches per step")
    schedule = "micro-batch schedule; 1f1b is interleaved if there are chunks; zero_bubble_v is MindSpore's V"
    add("--schedule", choices=SCHEDULES, help=schedule)
    add("--max-memory", type=_memory_size, metavar="SIZE", help="memory limit of every stage, such as 58GB")


def _add_planning_options(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--formula", action="store_true", help=argparse.SUPPRESS)  # deprecated, without effect
    swap = "also choose layers of a run whose attention is swapped to the host (swap_config)"
    add("--swap", action="store_true", help=swap)
    add("--device", metavar="FILE", help=f"device description for a run: a YAML or a name (default: {DEFAULT})")
    validate = "check the plan of a run by a dry run, and correct it until it fits (default: yes)"
    add("--validate", action=argparse.BooleanOptionalAction, help=validate)
    seconds = "approximate time limit of a plan (default: %(default)s)"
    add("--seconds", type=positive_number, default=60.0, metavar="SECONDS", help=seconds)
    add("--manual", type=Path, metavar="FILE", help="evaluate the plans in this YAML instead of planning")
    add("--explain", action="store_true", help="show the binding constraint and the gain of one more GB")
    add_memory_option(parser)
    add("--json", action="store_true", help="print one JSON object instead of tables")


def _add_output_options(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--yaml", type=output_file, metavar="FILE", help="write offset and recompute lists")
    torch = "write the order of passes as pipeline_parallel_schedule_csv of torchtitan"
    add("--torch-csv", type=output_file, metavar="FILE", help=torch)
    add("--megatron", type=output_file, metavar="FILE", help="write the split as options of Megatron-LM")
    apply = "write a run with the plan to --output (default: the planned run)"
    add("--apply", type=Path, nargs="?", const=PLANNED_RUN, metavar="RUN.yaml", help=apply)
    add("--output", type=output_file, metavar="FILE", help="YAML file that --apply writes")
    add("--picture", type=output_file, metavar="FILE", help=f"draw the schedule: {', '.join(FORMATS)}")


def _memory_size(text: str) -> str:
    file_size(text)  # raises ArgumentTypeError for an invalid size
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan a run or a problem, and write the files; return the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)
    _check_options(options, overrides)
    if options.formula:
        error_console.print("--formula is deprecated: costs are always estimated; --no-validate skips the dry run")
    validates = options.validate
    if validates is None:
        validates = bool(options.apply or options.run) and not options.manual
    console = error_console if options.json else output
    subject = _subject(options, overrides, validates)
    if not options.json:
        _print(subject.parts(), console)
    if options.manual:
        return _evaluate_manual(options, subject, console)
    from mindllm.planning.outcome import make_plan

    with drawn(transient=subject.simulations is None) as progress:
        if subject.simulations:
            subject.simulations.progress = progress
        progress("planning", 0, 1)
        plan = make_plan(subject, options.seconds, validates)
        progress("planning", 1, 1)
    _print(plan.choice(), console)
    if options.json:
        print_json(plan.to_dict())
    else:
        _print(plan.answer(), console)
    _write_files(options, plan, console)
    if options.apply:
        _apply(options, plan, console, validates)
    if options.explain:
        with drawn() as progress:
            progress("planning again with more memory", 0, 1)
            explanation = plan.explain(options.seconds)
        _print(explanation, console)
    return 0


def _check_options(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Raise UserError for options that contradict each other."""
    if options.run is not None:
        for name in ("stages", "micro_batches", "schedule"):
            if getattr(options, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option}: is a key of the run; use for example --parallel_config.micro_batch_num=64")
    else:
        for name in ("validate", "device", "swap"):
            if getattr(options, name):
                raise UserError(f"--{name} requires a run")
        if overrides:
            raise UserError(f"{overrides[0]}: unknown option; only a run has keys")
        if options.apply == PLANNED_RUN:
            raise UserError("--apply requires a run; pass --apply RUN.yaml")
    if bool(options.apply) != bool(options.output):
        raise UserError("--apply requires --output, and --output requires --apply")
    if options.instance and not options.problem:
        raise UserError("--instance requires --problem")
    if options.picture and options.picture.suffix not in FORMATS:
        raise UserError(f"--picture {options.picture}: must end in {', '.join(FORMATS)}")
    if options.manual and len(options.interleave or ()) > 1:
        raise UserError("--manual takes a single --interleave count")
    if options.manual and any((options.yaml, options.apply, options.explain, options.torch_csv, options.megatron)):
        raise UserError("--manual makes no plan; remove --yaml, --torch-csv, --megatron, --apply and --explain")


def _subject(options: argparse.Namespace, overrides: Sequence[str], validates: bool) -> Subject:
    """Return the subject of the plan, with dry runs if the plan is validated."""
    from mindllm.api import load_config, read_device
    from mindllm.planning import subject
    from mindllm.planning.read_problem import Setting

    if options.run is not None:
        config, device = load_config(options.run, overrides), read_device(options.device)
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


def _evaluate_manual(options: argparse.Namespace, subject: Subject, console: PlainConsole) -> int:
    """Evaluate the plans of a YAML; return the exit code."""
    from mindllm.planning.reports.picture import draw_schedule
    from mindllm.planning.reports.plan import manual_answer, manual_parts
    from mindllm.planning.yaml_plan import evaluate_manual

    with drawn() as progress:
        progress("evaluating plans", 0, 1)
        evaluations = evaluate_manual(subject.problems[0], options.manual)
        plans = {name: subject.predict_step(plan) for name, plan in evaluations.items()}
    if options.json:
        print_json({"plans": {name: manual_answer(evaluation) for name, evaluation in plans.items()}})
    else:
        _print(manual_parts(plans), console)
    if options.picture:
        draw_schedule(min(plans.values(), key=lambda evaluation: evaluation.reported_step), options.picture)
    if not any(evaluation.fits for evaluation in plans.values()):
        raise CheckFailed("none of the manual plans fits the memory")
    return 0


def _write_files(options: argparse.Namespace, plan: PipelinePlan, console: PlainConsole) -> None:
    """Draw the schedule and write the plan in the requested formats."""
    from mindllm.config.reading.yaml_tree import write_yaml

    if options.picture:
        with drawn() as progress:
            progress(f"drawing {options.picture}", 0, 1)
            plan.draw(options.picture)
        console.print(f"wrote {options.picture}")
    texts = {
        options.yaml: lambda: write_yaml(plan.keys),
        options.torch_csv: lambda: plan.torch_schedule,
        options.megatron: lambda: plan.megatron_options,
    }
    for path, text in texts.items():
        if path:
            with atomic_open(path) as file:
                file.write(text())
            console.print(f"wrote {path}")


def _apply(options: argparse.Namespace, plan: PipelinePlan, console: PlainConsole, validates: bool) -> None:
    """Write a run with the plan, and print whether a dry run confirmed that it fits."""
    from mindllm.config import load_config
    from mindllm.planning.validate import check_fits, write_run
    from mindllm.recipes.recipe import removal_note, remove_spares

    if options.apply == PLANNED_RUN and plan.subject.run:
        run = plan.config
    else:
        run = load_config(options.apply, plan.written.overrides(plan.best.problem))
    is_ascend = run.context.device_target == "Ascend"
    if plan.validated is None and validates and is_ascend:
        from mindllm.dry_run.simulations import simulations_here

        with drawn(transient=False) as progress:
            check_fits(run, simulations_here(progress=progress))
    write_run(options.output, run)
    validated = "validated by the dry run"
    if not validates:
        validated = "not validated by a dry run (--no-validate)"
    elif not is_ascend:
        validated = "not validated: MindSpore's dry run simulates Ascend only (context.device_target)"
    gain = f": {plan.gain}" if plan.gain else ""
    console.print(f"wrote {options.output}{gain}; {validated}")
    if note := removal_note(options.output, remove_spares(options.output)):
        error_console.print(note)


if __name__ == "__main__":
    run_command(main)
