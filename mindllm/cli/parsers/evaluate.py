"""The options of ``mindllm evaluate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory, positive

EXAMPLE = """examples:
  %(prog)s --model models/llama3-8b --tasks mmlu,arc_challenge --num_fewshot 5 --limit 100
  %(prog)s --model output/llama2_tiny/checkpoint/llm-400 --tasks boolq --data /data/hub --json
  %(prog)s --model models/chat --tasks gsm8k --apply_chat_template --gen_kwargs max_gen_toks=512

Data sets are read from --data, in the layout of the hub (cais/mmlu lies in DATA/cais/mmlu); nothing is downloaded. Tasks are
those of lm-evaluation-harness (python -m lm_eval ls tasks) and our own, modellink_*. An evaluation that was interrupted goes on
where it was. Exit codes: 0 good, 1 a task failed, 2 wrong input, 130 interrupted.
"""
DATA, BATCH_SIZE = "./eval_data", 8  # defaults of mindllm.config.generation


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("evaluate"),
        description="Evaluates a Hugging Face directory or a checkpoint with lm-evaluation-harness.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="PATH", help="Hugging Face directory, or checkpoint of a run")
    add("--tasks", type=_names, required=True, metavar="A,B", help="tasks, or groups of them, separated by commas")
    add("--data", default=DATA, metavar="DIR", help="directory of data sets (default %(default)s)")
    add("--limit", type=positive, metavar="N", help="questions of each task (default all)")
    add("--num_fewshot", type=int, metavar="K", help="solved examples before a question (default what the task says)")
    add("--batch_size", type=positive, default=BATCH_SIZE, metavar="B", help="texts at once (%(default)s)")
    add("--max_length", type=positive, metavar="L", help="most tokens of a text (default the model's)")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer (default that of the model)")
    add("--apply_chat_template", action="store_true", help="ask as in a conversation, examples as its turns")
    add("--gen_kwargs", type=_pairs, default={}, metavar="K=V,…", help="options of what the model writes")
    add("--include_path", default="", metavar="DIR", help="directory of more tasks, as YAMLs of the harness")
    add(
        "--confirm_run_unsafe_code",
        action="store_true",
        help="run code that the model writes (HumanEval), or that tasks of --include_path name",
    )
    add("--log_samples", action="store_true", help="write every question with its answer")
    add("--output", type=output_directory, default=Path("output_evaluate"), metavar="DIR", help="(%(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("names no task")
    return names


def _pairs(text: str) -> dict[str, Any]:
    """``a=1,b=x`` as a mapping; values are read as YAML would."""
    import yaml

    found = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise argparse.ArgumentTypeError(f"{part}: write name=value")
        found[name.strip()] = yaml.safe_load(value)
    return found
