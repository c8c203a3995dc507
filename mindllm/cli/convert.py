"""What ``mindllm convert`` does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mindllm.cli.parsers.convert import make_parser
from mindllm.cli.registry import spelled
from mindllm.command import run_command
from mindllm.config.reading.load import build_config, load_config, read_file
from mindllm.config.reading.shipped import shipped_configs
from mindllm.config.reading.shorten import short_yaml, write_short
from mindllm.config.reading.yaml_tree import write_yaml
from mindllm.config.run import RunConfig
from mindllm.errors import UserError
from mindllm.files import atomic_open, naming
from mindllm.mindformers.convert import Conversion, convert
from mindllm.mindformers.recognise import is_mindformers
from mindllm.mindformers.report import account, as_json
from mindllm.terminal.console import output, print_json
from mindllm.terminal.tables import Table, texts

CONFIGS = shipped_configs()
TO_PYNATIVE = (
    "The run {source} for MindFormers' PyNative trainer, by {command} --to mindformers-2, read back as the same run."
)
COMMENT = "Converted from {source} by {command}, which says what became of every key."


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts one file; returns the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)
    if options.to:
        return _write_pynative(options, overrides)
    theirs = read_file(options.source)
    if not is_mindformers(theirs):
        raise UserError(f"{options.source}: is no YAML of MindFormers: it has hardly a key that only MindFormers has")
    conversion = convert(theirs, overrides)
    config, problem = _checked(conversion, options.source)
    text = _written(config, options.source, options.output) if config else None
    if options.json:
        print_json(as_json(options.source, conversion, problem, text))
    else:
        for part in account(options.source, conversion, options.changes):
            output.print(part)
        if text is not None:
            output.print(
                f"wrote {options.output}" if options.output else f"\n{text}", end="\n" if options.output else ""
            )
    if problem:
        raise UserError(problem)
    return 0


def _write_pynative(options: Namespace, overrides: Sequence[str]) -> int:
    """Write any run in the form of MindFormers 2.x's PyNative trainer; return the exit code."""
    from mindllm.mindformers.to_pynative import write_pynative
    from mindllm.parallel.layer_plan import make_plan

    if options.changes:
        raise UserError("--changes: cuts the table of a conversion to ours; leave it out")
    config = load_config(options.source, overrides)
    written = write_pynative(config, make_plan(config).layers)
    text = f"# {TO_PYNATIVE.format(source=options.source.name, command=spelled('convert'))}\n{write_yaml(written.tree)}"
    if options.output:
        with naming(options.output), atomic_open(options.output) as file:
            file.write(text)
    if options.json:
        print_json({"yaml": text, "not carried over": written.told})
        return 0
    table = Table("not carried over; what is computed stays the same", texts("key", "there"))
    for key, told in written.told.items():
        table.add_row(key, told)
    if written.told:
        output.print(table)
    output.print(f"wrote {options.output}" if options.output else f"\n{text}", end="\n" if options.output else "")
    return 0


def _checked(conversion: Conversion, source: Path) -> tuple[RunConfig | None, str]:
    """The configuration, or why there is none."""
    try:
        return build_config(conversion, source), ""
    except UserError as error:
        return None, str(error)


def _written(config: RunConfig, source: Path, output: Path | None) -> str:
    bases = sorted(CONFIGS.rglob("*.yaml"))
    comment = COMMENT.format(source=source.name, command=spelled("convert"))
    if output is None:
        return short_yaml(config, bases, comment)
    return write_short(config, output, bases, comment)


if __name__ == "__main__":
    run_command(main)
