"""``mindllm generate`` and ``mindllm chat``: use a model, or the run of a YAML.

For a model, the settings are chosen and written as a YAML that repeats the command.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.run import LAST, TINY, add_print_config, print_config, run, run_epilog, with_mode
from mindllm.command import CommandParser, output_directory, output_file
from mindllm.errors import UserError
from mindllm.process.interrupts import receive_interrupts
from mindllm.terminal.console import error_console

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.recipes.model_source import ModelSource

CHAT, GENERATE = "chat", "generate"
DESCRIPTIONS = {
    CHAT: "Chats with a model in the terminal.",
    GENERATE: "Answers prompts with a model; continues them if the model has no chat template.",
}
EXAMPLES = {
    CHAT: f"""
  %(prog)s models/SmolLM2-135M-Instruct
  %(prog)s output/lora                # the newest checkpoint of a run; an adapter with its base
  %(prog)s {TINY} --load_checkpoint {LAST}
""",
    GENERATE: f"""
  %(prog)s models/SmolLM2-135M-Instruct --prompt "What is a list in Python?"
  %(prog)s models/SmolLM2-135M-Instruct --input prompts.jsonl --output answers.jsonl
  %(prog)s models/base --prompt "def main():" --max-new-tokens 64 --temperature 0.7 --do-sample
  %(prog)s {TINY} --load_checkpoint {LAST} --prompt "def main():"
""",
}
MODEL = "Hugging Face directory, GGUF file, checkpoint, output directory of a run, or PEFT adapter"
OUTPUT = Path("output")
MODES = {CHAT: "chat", GENERATE: "predict"}


def make_parser(verb: str) -> CommandParser:
    """Return the parser of ``chat`` or ``generate``."""
    prog = f"mindllm {verb}"
    prompts = "" if verb == CHAT else " --prompt TEXT | --input FILE"
    parser = CommandParser(
        prog=prog,
        takes_keys=True,
        usage=f"{prog} MODEL|RUN{prompts} [options]",
        description=DESCRIPTIONS[verb],
        epilog=run_epilog(EXAMPLES[verb]),
    )
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="MODEL|RUN", help=f"{MODEL}; or the YAML of a run")
    add("--base", type=Path, metavar="DIR", help="base weights of an adapter, if its own configuration is outdated")
    add_print_config(parser)
    if verb == CHAT:
        add("--output", type=output_directory, metavar="DIR", help="directory for the YAML (default: output/NAME)")
        return parser
    add("--prompt", action="append", metavar="TEXT", help="a prompt; repeatable")
    add("--input", type=Path, metavar="FILE", help="file of prompts: one per line, or .jsonl")
    add("--output", type=output_file, metavar="FILE", help="JSON Lines file for the answers (default: print them)")
    add("--raw", action="store_true", help="continue the text without a chat template")
    return parser


def main(arguments: Sequence[str] | None, verb: str) -> int:
    """Generate or chat; return the exit code."""
    receive_interrupts()
    options, config = read_use(arguments, verb)
    return print_config(config) if options.print_config else run(config)


def read_use(arguments: Sequence[str] | None, verb: str) -> tuple[Namespace, RunConfig]:
    """Return the options of the command line and their run; for a model, write its YAML.

    Raises:
        UserError: model or prompt are missing or invalid.
    """
    words = list(sys.argv[2:] if arguments is None else arguments)
    options, overrides = make_parser(verb).parse_known_args(words)
    if unknown := [word for word in overrides if not word.startswith("-")]:
        hint = "pass a prompt with --prompt TEXT" if verb == GENERATE else "type the message after the prompt appears"
        raise UserError(f"mindllm {verb}: {' '.join(unknown)}: unexpected argument; {hint}")
    if options.model is None:
        raise UserError(f"mindllm {verb}: a model is missing; example: mindllm {verb} models/DIR")
    is_run = options.model.suffix in (".yaml", ".yml")
    if verb == GENERATE:
        overrides = [*overrides, *_prompt_keys(options, is_run)]
    overrides = with_mode(overrides, MODES[verb])
    if is_run:
        from mindllm.config import load_config

        return options, load_config(options.model, overrides)
    return options, _configure_model(options, overrides, verb, shlex.join(["mindllm", verb, *words]))


def _prompt_keys(options: Namespace, is_run: bool) -> list[str]:
    """Return the options of ``generate`` that are keys of the run."""
    if options.prompt and options.input:
        raise UserError("mindllm generate: --prompt and --input exclude each other; remove one")
    if not is_run and not options.prompt and not options.input:
        raise UserError('mindllm generate: a prompt is missing; pass --prompt "…" or --input FILE')
    keys = []
    if options.input:
        if not options.input.is_file():
            raise UserError(f"--input {options.input}: no such file; pass the text of a prompt with --prompt")
        keys.append(f"--input_data={options.input.resolve()}")
    elif options.prompt:
        # as a list in YAML, so that a prompt is not read as a number, a file or a list
        keys.append(f"--input_data={json.dumps(options.prompt, ensure_ascii=False)}")
    if options.output:
        keys.append(f"--save_file={options.output.resolve()}")
    return keys + ["--generation.apply_chat_template=false"] * bool(options.raw and is_run)


def _configure_model(options: Namespace, overrides: list[str], verb: str, command: str) -> RunConfig:
    """Return the run of a model with chosen settings, and write its YAML."""
    from mindllm.recipes.model_source import find_model
    from mindllm.recipes.using import chat_recipe, generate_recipe

    model = find_model(options.model, options.base)
    for note in model.notes():
        error_console.print(note)
    path = _yaml_path(options, model, verb)
    if verb == CHAT:
        recipe = chat_recipe(model, command, path.parent)
    else:
        recipe = generate_recipe(model, command, path.parent, as_chat=False if options.raw else None)
    made = recipe.made(overrides)
    if not options.print_config:
        try:
            made.write(path)
            again = shlex.join(["mindllm", verb, str(path)])
            error_console.print(f"settings and reasons: {path} (repeat: {again})")
        except UserError as error:  # without --output, an answer does not depend on the file
            if options.output is not None:
                raise
            error_console.print(f"settings are not saved: {error}")
    return made.config


def _yaml_path(options: Namespace, model: ModelSource, verb: str) -> Path:
    """Return the path of the YAML: next to the output, else below ``output/``, outside directories of other runs."""
    if options.output is None:
        from mindllm.train.job.output_directory import describe_results

        directory = OUTPUT / model.name
        of_other_run = not model.path.resolve().is_relative_to(directory.resolve()) and bool(
            describe_results(directory)
        )
        return (OUTPUT / f"{model.name}-{verb}" if of_other_run else directory) / f"{verb}.yaml"
    return options.output / f"{verb}.yaml" if verb == CHAT else options.output.with_suffix(".yaml")
