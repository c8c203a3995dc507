"""``mindllm chat`` and ``mindllm generate``: their options, and how they come to a run.

That is from a model alone, by a YAML that is written beside it; or by the YAML of a run.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindllm.cli.run_options import KEYS, TINY, with_mode
from mindllm.command import CommandParser, output_directory, output_file
from mindllm.errors import UserError
from mindllm.shorthands import SHORTHANDS

if TYPE_CHECKING:
    from mindllm.config import RunConfig
    from mindllm.recipes.model_source import ModelSource
    from mindllm.recipes.recipe import Recipe

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
OUTPUT = Path("output")
MODES = {CHAT: "chat", GENERATE: "predict"}


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
        add("--output", type=output_directory, metavar="DIR", help="directory for the YAML (default output/NAME)")
        return parser
    add("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    add("--input", type=Path, metavar="FILE", help="prompts: a line of text each, or a .jsonl file")
    add("--output", type=output_file, metavar="FILE", help="JSON Lines file for the answers (default: on the terminal)")
    add("--raw", action="store_true", help="continue the text as it is: no chat template")
    return parser


def read_use(arguments: Sequence[str] | None, verb: str) -> tuple[Namespace, RunConfig]:
    """Return the options of the command line and the run that they mean; its YAML is written.

    Raises:
        UserError: no model, or none that is one; or no prompt.
    """
    given = list(sys.argv[2:] if arguments is None else arguments)
    options, overrides = make_parser(verb).parse_known_args(given)
    _refuse_words(overrides, verb)
    overrides = with_mode([*overrides, *_asked(options, verb)], MODES[verb])
    if bool(options.model) == bool(options.config):
        raise UserError(f"mindllm {verb}: name a model, as in mindllm {verb} DIR, or --config FILE: one of them")
    if options.config:
        from mindllm.config import load_config

        return options, load_config(options.config, overrides)
    return options, _of_model(options, overrides, verb, given)


def _refuse_words(rest: Sequence[str], verb: str) -> None:
    """Refuse a word that is no option's value: most often a prompt."""
    if words := [word for word in rest if not word.startswith("-")]:
        advice = "give a prompt by --prompt TEXT" if verb == GENERATE else "say it once the model asks for it"
        raise UserError(f"mindllm {verb}: {' '.join(words)}: not an option; {advice}")


def _of_model(options: Namespace, overrides: list[str], verb: str, given: Sequence[str]) -> RunConfig:
    from mindllm.recipes.model_source import find_model
    from mindllm.terminal.console import error_console

    model = find_model(options.model, options.base)
    for note in model.notes():
        error_console.print(note)
    place = _yaml_of(options, model, verb)
    made = _recipe(model, options, verb, shlex.join(["mindllm", verb, *given]), place.parent).made(overrides)
    if not options.print_config:
        try:
            made.write(place)
            again = shlex.join(["mindllm", verb, "--config", str(place)])
            error_console.print(f"every choice, and why: {place} (again: {again})")
        except UserError as error:  # nobody asked for the file: an answer does not need it
            if options.output is not None:
                raise
            error_console.print(f"every choice stays unwritten: {error}")
    return made.config


def _recipe(model: ModelSource, options: Namespace, verb: str, command: str, output: Path) -> Recipe:
    from mindllm.recipes.using import chat_recipe, generate_recipe

    if verb == CHAT:
        return chat_recipe(model, command, output)
    if not options.prompt and not options.input:
        raise UserError('mindllm generate: nothing is asked; give --prompt "…" or --input FILE')
    return generate_recipe(model, command, output, as_chat=False if options.raw else None)


def _asked(options: Namespace, verb: str) -> list[str]:
    """What options of this command are keys of the run."""
    if verb == CHAT:
        return []
    if options.prompt and options.input:
        raise UserError("mindllm generate: --prompt and --input are both given; keep one")
    asked = []
    if options.input:
        asked.append(f"--input_data={_file(options.input)}")
    elif options.prompt:
        asked.append(f"--input_data={_as_yaml(options.prompt)}")
    if options.output:
        asked.append(f"--save_file={options.output.resolve()}")
    return asked + ["--generation.apply_chat_template=false"] * bool(options.raw and options.config)


def _file(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"--input {path}: no such file; a prompt itself is given by --prompt")
    return path.resolve()


def _as_yaml(prompts: list[str]) -> str:
    """Prompts as a list in YAML, so that none is read as a number, a file or a list itself."""
    import json

    return json.dumps(prompts, ensure_ascii=False)


def _yaml_of(options: Namespace, model: ModelSource, verb: str) -> Path:
    """Where the YAML of the run is written: beside what it writes, else below ``output/``, in no directory of another run."""
    if options.output is None:
        from mindllm.train.job.output_directory import describe_results

        place = OUTPUT / model.name
        of_another = not model.path.resolve().is_relative_to(place.resolve()) and bool(describe_results(place))
        return (OUTPUT / f"{model.name}-{verb}" if of_another else place) / f"{verb}.yaml"
    return options.output / f"{verb}.yaml" if verb == CHAT else options.output.with_suffix(".yaml")
