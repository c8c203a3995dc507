"""``mindllm profile``: where a recorded step differs from the predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, output_file, positive, run_command
from mindllm.terminal.render import show
from mindllm.timing.shipped import DEFAULT, shipped_devices

EXAMPLES = """example:
  %(prog)s run.yaml output/profile
  %(prog)s run.yaml output/profile --device my_device.yaml --page profile.html
  %(prog)s run.yaml output/profile/rank_0 --steps 4 --calibrate my_device.yaml
"""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="mindllm profile",
        takes_keys=True,
        description="Where a recorded step differs from the predicted one: kernels by shape, exchanges, bubbles, gaps of the "
        "host, ranks, data; and what each is worth. Reads what MindSpore's profiler leaves (step_trace_time.csv, "
        "kernel_details.csv, communication.json, communication_matrix.json, trace_view.json). Further options change "
        "keys of the configuration, as with run_llm.py.",
        epilog=EXAMPLES,
    )
    parser.add_argument("run", metavar="YAML", help="the run that was recorded, or a Hugging Face directory")
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the recording of a rank, or above those of several; or a trace"
    )
    parser.add_argument(
        "--device",
        default=DEFAULT,
        metavar="FILE",
        help=f"a YAML, or one of {', '.join(shipped_devices())} (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="steps of a recording whose files do not tell them apart (default: as profile_start_step and profile_stop_step say)",
    )
    parser.add_argument("--page", type=output_file, metavar="FILE", help="the same as a page (HTML)")
    parser.add_argument(
        "--calibrate", type=output_file, metavar="FILE", help="the device as it was recorded, for --device"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Say where a recorded step differs from the predicted one."""
    options, overrides = make_parser().parse_known_args(arguments)

    from mindllm.config import load_config
    from mindllm.profiles.calibrated import write_device
    from mindllm.profiles.page import write_page
    from mindllm.profiles.run import explain_profile
    from mindllm.timing.device import read_device

    found = explain_profile(
        load_config(options.run, overrides), options.directory, read_device(options.device), options.steps
    )
    if options.page:
        write_page(found, options.page, f"{options.run}: {options.directory}")
    if options.calibrate:
        write_device(found, options.calibrate)
    show(found, options.json)
    return 0


if __name__ == "__main__":
    run_command(main)
