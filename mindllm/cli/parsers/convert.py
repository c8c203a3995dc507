"""The options of ``mindllm convert``."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser

FORMS = ("mindformers-2",)
EXAMPLE = """examples:
  %(prog)s pretrain_llama2_7b.yaml
  %(prog)s pretrain_llama2_7b.yaml -o configs/ours.yaml --train_dataset_dir data/wiki.mindrecord
  %(prog)s finetune_qwen3.yaml --pretrained_model_dir models/Qwen3-8B --json
  %(prog)s configs/qwen3/pretrain_qwen3_32b.yaml --to mindformers-2 --runner_config.train_steps=1000 -o theirs.yaml

run_llm.py, scripts/dry_run.sh and every tool with --config read a YAML of MindFormers themselves: this shows how.
Options are keys of theirs or of ours, as on the command line of run_llm.py. MindFormers ignores some of its own keys:
  --mindformers.ignored_keys=as_run      they are left out, as its runs were (default)
  --mindformers.ignored_keys=as_written  they are taken at their word
Exit codes: 0 converted, 2 something is refused, unknown, or does not fit together.
"""


def make_parser() -> CommandParser:
    """Returns the parser of what is not an override."""
    parser = CommandParser(
        prog=spelled("convert"),
        takes_keys=True,
        usage="%(prog)s THEIRS [-o OURS] [--changes] [--to FORM] [--json] [--section.key=value ...]",
        description="Converts a YAML of MindFormers (1.3 to 2.1): each of its keys is used, translated, without effect here, or "
        "refused, and the table says which and why. Ours is written short, over a base of configs/ where one fits.",
        epilog=EXAMPLE,
    )
    parser.add_argument("source", type=Path, metavar="THEIRS", help="YAML of MindFormers; with --to, any run")
    parser.add_argument("-o", "--output", type=Path, metavar="OURS", help="file to write; without it, it is printed")
    parser.add_argument(
        "--changes", action="store_true", help="show only keys that change what is computed, or what it costs"
    )
    parser.add_argument(
        "--to",
        choices=FORMS,
        metavar="FORM",
        help=f"write a run of ours, or of theirs, as {FORMS[0]} has it: the YAML of MindFormers 2.x's PyNative trainer",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
