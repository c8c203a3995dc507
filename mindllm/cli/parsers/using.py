"""The options of ``mindllm chat`` and ``mindllm generate``: a model and nothing else, or the YAML of a run."""

from __future__ import annotations

from pathlib import Path

from mindllm.cli.parsers.run import KEYS, TINY
from mindllm.command import CommandParser, output_directory, output_file
from mindllm.shorthands import SHORTHANDS

CHAT, GENERATE = "chat", "generate"
DESCRIPTIONS = {
    CHAT: "Talks to a model in the terminal.",
    GENERATE: "Answers prompts with a model, or continues them where the model has no chat template.",
}
EXAMPLES = {
    CHAT: f"""
  %(prog)s models/SmolLM2-135M-Instruct
  %(prog)s output/lora                          # the newest checkpoint of a run, an adapter with its base
  %(prog)s --config {TINY} --load_checkpoint output/llama2_tiny/checkpoint/llm-400
""",
    GENERATE: """
  %(prog)s models/SmolLM2-135M-Instruct --prompt "What is a list in Python?"
  %(prog)s models/SmolLM2-135M-Instruct --input prompts.jsonl --output answers.jsonl
  %(prog)s models/base --prompt "def main():" --max_new_tokens 64 --temperature 0.7 --do_sample
""",
}
MODEL = "Hugging Face directory, checkpoint, output of a run, or adapter of PEFT"


def make_parser(verb: str) -> CommandParser:
    """Return the parser of ``chat`` or ``generate``."""
    prog = f"mindllm {verb}"
    shorthands = "\n".join(f"  --{short} = --{full}" for short, full in SHORTHANDS.items())
    asked = {CHAT: "", GENERATE: ' --prompt "…" | --input FILE [--output FILE]'}[verb]
    parser = CommandParser(
        prog=prog,
        takes_keys=True,
        usage=f"{prog} MODEL{asked} [--section.key=value ...]\n       {prog} --config FILE [--section.key=value ...]",
        description=DESCRIPTIONS[verb],
        epilog=f"shorthands:\n{shorthands}\n\nexamples:{EXAMPLES[verb]}{KEYS}",
    )
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="MODEL", help=MODEL)
    add("--config", metavar="FILE", help="YAML of a run, in place of MODEL: also one that this command has written")
    add("--base", type=Path, metavar="DIR", help="weights of an adapter whose own file does not find them")
    add("--print_config", action="store_true", help="print the resolved YAML and exit")
    if verb == CHAT:
        add("--output", type=output_directory, metavar="DIR", help="where the YAML is written (default output/NAME)")
        return parser
    add("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    add("--input", type=Path, metavar="FILE", help="prompts: a line of text each, or a .jsonl file")
    add("--output", type=output_file, metavar="FILE", help="answers as JSON Lines (default: on the terminal)")
    add("--raw", action="store_true", help="continue the text as it is: no chat template")
    return parser
