"""What ``mindllm search`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.cli.parsers.search import make_parser
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.strategies.outcome import PAGE, Wanted, find_strategies
from mindllm.terminal.console import error_console, output
from mindllm.terminal.render import drawn, show
from mindllm.timing.device import read_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, shows and writes; returns 0 when a strategy fits."""
    options, overrides = make_parser().parse_known_args(arguments)
    config, device = load_config(options.config, overrides), read_device(options.device)
    directory = Path(options.output)
    directory.mkdir(parents=True, exist_ok=True)
    wanted = Wanted(
        options.devices, options.global_batch, options.best, options.seconds, options.dry_run,
        schedules=tuple(options.schedules),
    )  # fmt: skip
    with drawn() as progress:
        found = find_strategies(config, device, wanted, directory, progress)
    found.write_page(directory / PAGE)
    show(found, options.json)
    if not options.json:
        output.print(f"{directory / PAGE}: memory and speed of all")
    if options.apply:
        found.write(options.apply)
        error_console.print(f"wrote {options.apply}: {found.recommended_name}")
    return 0


if __name__ == "__main__":
    run_command(main)
