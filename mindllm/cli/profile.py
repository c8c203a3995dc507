"""What ``mindllm profile`` does."""

from __future__ import annotations

from collections.abc import Sequence

from mindllm.cli.parsers.profile import make_parser
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.profiles.calibrated import write_device
from mindllm.profiles.page import write_page
from mindllm.profiles.run import explain_profile
from mindllm.terminal.render import show
from mindllm.timing.device import read_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Say where a recorded step differs from the predicted one."""
    options, overrides = make_parser().parse_known_args(arguments)
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
