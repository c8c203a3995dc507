"""The options of ``mindllm evaluate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindllm.cli.registry import spelled
from mindllm.command import CommandParser, output_directory, positive

EXAMPLE = """examples:
  %(prog)s models/llama3-8b --tasks mmlu,arc_challenge --num_fewshot 5 --limit 100
  %(prog)s output/llama2_tiny/checkpoint/llm-400 --tasks boolq --data /data/hub --json
  %(prog)s models/chat --tasks gsm8k --apply_chat_template --gen_kwargs max_gen_toks=512
  %(prog)s --config output_evaluate/evaluate.yaml

Data sets are read from --data, in the layout of the hub (cais/mmlu lies in DATA/cais/mmlu); nothing is downloaded. Tasks are
those of lm-evaluation-harness (python -m lm_eval ls tasks) and our own, modellink_*. An evaluation that was interrupted goes on
where it was. What was chosen is written to OUTPUT/evaluate.yaml, which --config repeats.
Exit codes: 0 good, 1 a task failed, 2 wrong input, 130 interrupted.
"""
OUTPUT = "output_evaluate"
DATA, BATCH_SIZE = "./eval_data", 8  # defaults of mindllm.config.generation


def make_parser() -> CommandParser:
    """Returns the parser of the command line."""
    parser = CommandParser(
        prog=spelled("evaluate"),
        takes_keys=True,
        description="Evaluates a Hugging Face directory or a checkpoint with lm-evaluation-harness.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add(
        "named",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, checkpoint, run or adapter",
    )
    add("--model", type=Path, metavar="PATH", help="the same, as an option")
    add("--base", type=Path, metavar="DIR", help="weights of an adapter whose own file does not find them")
    add("--config", metavar="FILE", help="YAML of an evaluation, in place of MODEL and --tasks")
    add("--tasks", type=_names, metavar="A,B", help="tasks, or groups of them, separated by commas")
    add("--data", metavar="DIR", help=f"directory of data sets (default {DATA})")
    add("--limit", type=positive, metavar="N", help="questions of each task (default all)")
    add("--num_fewshot", type=int, metavar="K", help="solved examples before a question (default what the task says)")
    add("--batch_size", type=positive, metavar="B", help=f"texts at once ({BATCH_SIZE})")
    add("--max_length", type=positive, metavar="L", help="most tokens of a text (default the model's)")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer (default that of the model)")
    add(
        "--apply_chat_template",
        action="store_true",
        default=None,
        help="ask as in a conversation, examples as its turns",
    )
    add("--gen_kwargs", type=_pairs, metavar="K=V,…", help="options of what the model writes")
    add("--include_path", metavar="DIR", help="directory of more tasks, as YAMLs of the harness")
    add(
        "--confirm_run_unsafe_code",
        action="store_true",
        default=None,
        help="run code that the model writes (HumanEval), or that tasks of --include_path name",
    )
    add("--log_samples", action="store_true", default=None, help="write every question with its answer")
    add("--output", type=output_directory, metavar="DIR", help=f"(default {OUTPUT}; that of the YAML with --config)")
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
