"""``mindllm profile``: compare a recorded step with the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.cli.common import add_device_option, add_json_option
from mindllm.command import CommandParser, output_file, positive, run_command
from mindllm.terminal.render import show

EXAMPLES = """examples:
  %(prog)s run.yaml output/profile
  %(prog)s run.yaml output/profile --device my_device.yaml --page profile.html
  %(prog)s run.yaml output/profile/rank_0 --steps 4 --calibrate my_device.yaml
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm profile",
        takes_keys=True,
        description="Compares a recorded step with the predicted one: kernels by shape, communication, bubbles, host gaps, "
        "ranks and data, with the time that each costs. Reads the output of MindSpore's profiler (step_trace_time.csv, "
        "kernel_details.csv, communication.json, communication_matrix.json, trace_view.json).",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    parser.add_run("recorded run: a YAML or a Hugging Face directory")
    add("directory", type=Path, metavar="DIR", help="profile of a rank, directory of several ranks, or a trace")
    add_device_option(parser)
    steps = "recorded steps, if the files do not separate them (default: profile_start_step to profile_stop_step)"
    add("--steps", type=positive, metavar="N", help=steps)
    add("--page", type=output_file, metavar="FILE", help="write the comparison as a page (HTML)")
    add("--calibrate", type=output_file, metavar="FILE", help="write the measured device as a YAML, for --device")
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare a recorded step with the predicted one; return the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.api import load_config, read_device
    from mindllm.profiles.calibrated import write_device
    from mindllm.profiles.page import write_page
    from mindllm.profiles.run import explain_profile

    config = load_config(options.run, overrides)
    comparison = explain_profile(config, options.directory, read_device(options.device), options.steps)
    if options.page:
        write_page(comparison, options.page, f"{options.run}: {options.directory}")
    if options.calibrate:
        write_device(comparison, options.calibrate)
    show(comparison, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
