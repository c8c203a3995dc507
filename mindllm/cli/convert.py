"""The command line ``python -m toolkit.convert_config``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindllm.command import CommandParser, run_command
from mindllm.config.load import build_config, read_file
from mindllm.config.run import RunConfig
from mindllm.config.shipped import shipped_configs
from mindllm.config.shorten import short_yaml, write_short
from mindllm.console import output, print_json
from mindllm.errors import UserError
from mindllm.mindformers.convert import Conversion, convert
from mindllm.mindformers.recognise import is_mindformers
from mindllm.mindformers.report import as_json, print_account

CONFIGS = shipped_configs()
EXAMPLE = """examples:
  python -m toolkit.convert_config pretrain_llama2_7b.yaml
  python -m toolkit.convert_config pretrain_llama2_7b.yaml -o configs/ours.yaml --train_dataset_dir data/wiki.mindrecord
  python -m toolkit.convert_config finetune_qwen3.yaml --pretrained_model_dir models/Qwen3-8B --json

run_llm.py, scripts/dry_run.sh and every tool with --config read a YAML of MindFormers themselves: this shows how.
Options are keys of theirs or of ours, as on the command line of run_llm.py. MindFormers ignores some of its own keys:
  --mindformers.ignored_keys=as_run      they are left out, as its runs were (default)
  --mindformers.ignored_keys=as_written  they are taken at their word
Exit codes: 0 converted, 2 something is refused, unknown, or does not fit together.
"""
COMMENT = "Converted from {source} by python -m toolkit.convert_config, which says what became of every key."


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts one file; returns the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)
    theirs = read_file(options.source)
    if not is_mindformers(theirs):
        raise UserError(f"{options.source}: is no YAML of MindFormers: it has hardly a key that only MindFormers has")
    conversion = convert(theirs, overrides)
    config, problem = _checked(conversion, options.source)
    text = _written(config, options.source, options.output) if config else None
    if options.json:
        print_json(as_json(options.source, conversion, problem, text))
    else:
        print_account(options.source, conversion)
        if text is not None:
            output.print(
                f"wrote {options.output}" if options.output else f"\n{text}", end="\n" if options.output else ""
            )
    if problem:
        raise UserError(problem)
    return 0


def make_parser() -> CommandParser:
    """Returns the parser of what is not an override."""
    parser = CommandParser(
        prog="python -m toolkit.convert_config",
        usage="python -m toolkit.convert_config THEIRS [-o OURS] [--json] [--section.key=value ...]",
        description="Converts a YAML of MindFormers (1.3 to 2.1): each of its keys is used, translated, without effect here, or "
        "refused, and the table says which and why. Ours is written short, over a base of configs/ where one fits.",
        epilog=EXAMPLE,
    )
    parser.add_argument("source", type=Path, metavar="THEIRS", help="YAML of MindFormers")
    parser.add_argument("-o", "--output", type=Path, metavar="OURS", help="file to write; without it, it is printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _checked(conversion: Conversion, source: Path) -> tuple[RunConfig | None, str]:
    """The configuration, or why there is none."""
    try:
        return build_config(conversion, source), ""
    except UserError as error:
        return None, str(error)


def _written(config: RunConfig, source: Path, output: Path | None) -> str:
    bases = sorted(CONFIGS.rglob("*.yaml"))
    comment = COMMENT.format(source=source.name)
    if output is None:
        return short_yaml(config, bases, Path.cwd(), comment)
    return write_short(config, output, bases, comment)


if __name__ == "__main__":
    run_command(main)
