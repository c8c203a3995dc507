"""The options of the verbs that run a configuration, and of ``run_llm.py``: train, finetune, eval, predict and chat."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from mindllm.command import CommandParser
from mindllm.errors import UserError
from mindllm.shorthands import SHORTHANDS

if TYPE_CHECKING:  # the schema takes longer to import than --help may
    from mindllm.config import RunConfig

TINY, LAST = "configs/llama2/pretrain_llama2_tiny.yaml", "output/llama2_tiny/checkpoint/llm-400"
EXAMPLES = {
    "train": f"""
  %(prog)s {TINY}
  %(prog)s {TINY} --resume_training auto
  %(prog)s {TINY} --batch_size 4 --print_config
""",
    "finetune": f"""
  %(prog)s configs/llama2/finetune_llama2_tiny.yaml --load_checkpoint {LAST}
""",
    "eval": f"""
  %(prog)s {TINY} --load_checkpoint {LAST}
""",
    "predict": f"""
  %(prog)s {TINY} --load_checkpoint {LAST} \\
      --input_data "def main():"
  %(prog)s {TINY} --load_checkpoint {LAST} \\
      --input_data prompts.jsonl --save_file results.jsonl
""",
    "chat": f"""
  %(prog)s {TINY} --load_checkpoint {LAST}
""",
}
DESCRIPTION = "Trains, fine-tunes, evaluates, predicts and chats: one YAML, of which --a.b.c=value overrides any key."
DESCRIPTIONS = {
    "train": "Trains a model, from scratch or from a checkpoint.",
    "finetune": "Trains a pretrained model further: all of its weights, or an adapter.",
    "eval": "Tells the loss and perplexity of a checkpoint on held-out data.",
    "predict": "Continues prompts with a trained model.",
}
KEYS = """
Any key of the configuration can be given as --section.key=value, a key of the top level as --key value;
docs/config_reference.md lists them all. Exit codes: 0 good, 1 failure, 2 wrong input, 130 interrupted (Ctrl-C).
"""
SCRIPT = "run_llm.py"


def make_parser(run_mode: str = "") -> CommandParser:
    """Return the parser of what is not an override: of the verb that is called as its mode, or of ``run_llm.py``."""
    prog = f"mindllm {run_mode}" if run_mode else SCRIPT
    shorthands = "\n".join(f"  --{short} = --{full}" for short, full in SHORTHANDS.items())
    parser = CommandParser(
        prog=prog,
        takes_keys=True,
        usage=f"{prog} --config FILE [--print_config] [--section.key=value ...]",
        description=DESCRIPTIONS.get(run_mode, DESCRIPTION),
        epilog=f"shorthands:\n{shorthands}\n\nexamples:{_examples(run_mode)}{KEYS}",
    )
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="YAML of the run; also without --config, as the first word"
    )
    parser.add_argument("--print_config", action="store_true", help="print the resolved YAML and exit")
    return parser


def _examples(run_mode: str) -> str:
    """The examples of a verb; of ``run_llm.py`` those of all modes, with ``--run_mode`` where it is not that of the YAML."""
    if run_mode:
        return EXAMPLES[run_mode]
    said = {mode: "" if mode == "train" else f" --run_mode {mode}" for mode in EXAMPLES}
    return "".join(
        text.replace("%(prog)s", "python %(prog)s --config")  # as people of MindFormers write it
        .replace(".yaml", f".yaml{said[mode]}")
        .lstrip("\n" if mode != "train" else "")
        for mode, text in EXAMPLES.items()
    )


def read_config(arguments: Sequence[str] | None = None, run_mode: str = "") -> tuple[Namespace, RunConfig]:
    """Return the options of the command line, and the configuration that it names with its overrides."""
    options, overrides = make_parser(run_mode).parse_known_args(arguments)
    if run_mode:
        overrides = with_mode(overrides, run_mode)
    from mindllm.config import load_config

    return options, load_config(options.config, overrides)


def with_mode(overrides: Sequence[str], run_mode: str) -> list[str]:
    """Return the overrides with the mode of the verb.

    Raises:
        UserError: they name another one.
    """
    for option, following in pairwise([*overrides, ""]):
        name, equals, value = option.partition("=")
        given = value if equals else following
        if name == "--run_mode" and given != run_mode:
            other = f", or write mindllm {given}" if given in EXAMPLES else ""
            raise UserError(f"--run_mode {given}: contradicts mindllm {run_mode}; leave it out{other}")
    return [*overrides, f"--run_mode={run_mode}"]
