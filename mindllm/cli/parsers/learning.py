"""The options of ``mindllm finetune`` and ``mindllm pretrain``: a model and data and nothing else, or the YAML of a run."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.parsers.run import DESCRIPTIONS, KEYS, LAST
from mindllm.command import CommandParser, output_directory, positive
from mindllm.process.host_memory import add_memory_option
from mindllm.shorthands import SHORTHANDS

FINETUNE, PRETRAIN = "finetune", "pretrain"
METHODS = ("lora", "dora", "qlora", "dpo", "kto", "adalora", "adapter", "llamapro", "full", "galore", "lisa")
"""Of mindllm.recipes.rates."""
TEXT = {
    FINETUNE: DESCRIPTIONS[FINETUNE]
    + " What nobody says is chosen by model, data and machine, and written down with reasons.",
    PRETRAIN: "Trains a model of a known network from new weights on text. What nobody says is chosen by network, text and "
    "machine, and written down with reasons.",
}
USAGE = {FINETUNE: "MODEL DATA [--method M]", PRETRAIN: "--like MODEL TEXT [--tokenizer FILE]"}
EXAMPLES = {
    FINETUNE: f"""
  %(prog)s models/SmolLM2-135M-Instruct chats.jsonl
  %(prog)s models/SmolLM2-135M-Instruct chats.jsonl --method dora --epochs 2 --output output/mine
  %(prog)s models/SmolLM2-135M-Instruct pairs.jsonl --method dpo
  %(prog)s models/SmolLM2-135M-Instruct answers.jsonl --method kto
  %(prog)s --config output/mine/finetune.yaml --overwrite
  %(prog)s --config configs/llama2/finetune_llama2_tiny.yaml --load_checkpoint {LAST}
""",
    PRETRAIN: """
  %(prog)s --like qwen2_5_0_5b corpus.jsonl --tokenizer models/qwen/tokenizer.json
  %(prog)s --like models/SmolLM2-135M-Instruct texts/ --output output/mine
  %(prog)s --config output/mine/pretrain.yaml --resume_training
""",
}


def make_parser(verb: str) -> CommandParser:
    """Return the parser of ``finetune`` or ``pretrain``."""
    prog = f"mindllm {verb}"
    shorthands = "\n".join(f"  --{short} = --{full}" for short, full in SHORTHANDS.items() if short != "epochs")
    parser = CommandParser(
        prog=prog,
        takes_keys=True,
        usage=f"{prog} {USAGE[verb]} [--output DIR] [--section.key=value ...]\n"
        f"       {prog} --config FILE [--section.key=value ...]",
        description=TEXT[verb],
        epilog=f"shorthands:\n{shorthands}\n\nexamples:{EXAMPLES[verb]}{KEYS}",
    )
    _add_finetune(parser) if verb == FINETUNE else _add_pretrain(parser)
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML of a run instead: also one that this command has written")
    add("--output", type=output_directory, metavar="DIR", help="directory of the run (default: output/NAME)")
    add("--epochs", type=positive, metavar="N", help="passes over the data (default: by its size)")
    add("--print_config", action="store_true", help="print the resolved YAML and exit")
    add_memory_option(parser)
    return parser


def _add_finetune(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, checkpoint or output of a run",
    )
    data = "conversations, pairs of answers or labelled answers: .jsonl, .json, .csv, .parquet, or a directory (docs/data.md)"
    add("data", nargs="*", type=Path, metavar="DATA", help=data)
    add(
        "--method",
        choices=METHODS,
        help="how the model is changed (default: lora; of pairs dpo; of answers with a label kto; of codes qlora)",
    )
    add("--skip_bad_rows", action="store_true", help="leave out rows that cannot be used")


def _add_pretrain(parser: CommandParser) -> None:
    add = parser.add_argument
    add("data", nargs="*", type=Path, metavar="TEXT", help="text: .jsonl with text, .txt, or a directory of files")
    add(
        "--like",
        metavar="MODEL",
        help="the network: a shipped name (qwen2_5_0_5b), a directory, its config.json, or a GGUF file",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer (default: that of the directory, or one is trained)")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of a record that are its text (text)")
    add(
        "--format", choices=("auto", "text"), default="auto", help="text: every file is one document, whatever its name"
    )
