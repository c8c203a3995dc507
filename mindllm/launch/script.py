"""The script that a job's processes run: found where the user is, in the checkout that mindllm is in, or in the package."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from mindllm.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGED = Path(__file__).parent / "program" / "run_llm.py"
MODES = ("train", "finetune", "eval", "predict", "chat")  # verbs of mindllm that several processes can run
EXAMPLE = 'write "run_llm.py --config FILE"'
THEIRS = ("run_mindformer.py", "run_mindformers.py")


def command_of(text: str) -> list[str]:
    """Return the words of a quoted command, from the script on; an interpreter before it may be left out: it is this one.

    A verb of mindllm, ``train --config FILE``, is ``run_llm.py`` with that ``run_mode``; a YAML alone is run as it says.

    Raises:
        UserError: no script is named, or it is neither here nor in the checkout.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text}: a quotation in the command has no end ({error})") from None
    if words and re.fullmatch(r"python[\d.]*|mindllm", Path(words[0]).name):
        del words[0]
    if not words:
        raise UserError(f"the command names no script; {EXAMPLE}")
    script = Path(words[0])
    if script.suffix in (".yaml", ".yml"):
        return [_own_script(), "--config", *words]
    if words[0] in MODES and not script.is_file():
        return _of_verb(words[0], words[1:])
    if script.suffix != ".py" or script.is_file():
        return words
    if (CHECKOUT / script).is_file():
        return [str(CHECKOUT / script), *words[1:]]
    if script.name == PACKAGED.name:
        return [str(PACKAGED), *words[1:]]
    if script.name in THEIRS:
        raise UserError(f"{script}: is MindFormers' script, which is not here; run_llm.py reads its YAMLs: {EXAMPLE}")
    raise UserError(f"{script}: no such script, neither in {Path.cwd()} nor in {CHECKOUT}; {EXAMPLE}")


def config_word(words: Sequence[str]) -> tuple[int, str, str] | None:
    """Return where a command names its YAML: the number of the word, what stands in it before the name, and the name.

    None: it names none.
    """
    for index, word in enumerate(words):
        option, equal, said = word.partition("=")
        if option == "--config" and equal:
            return index, "--config=", said
        if option == "--config" and index + 1 < len(words):
            return index + 1, "", words[index + 1]
    bare = (index for index, word in enumerate(words) if index and word.endswith((".yaml", ".yml")) and word[0] != "-")
    return next(((index, "", words[index]) for index in bare), None)


def own_command(words: Sequence[str], msrun: bool) -> list[str]:
    """Return the words of the running program, from the script on, so that its ranks run the same; ``words`` are its own.

    msrun takes a script, not ``-m mindllm``.
    """
    again = list(words[1:])
    return command_of(shlex.join(again[again[0] == "-m" :])) if msrun and again else again


def _of_verb(mode: str, options: list[str]) -> list[str]:
    if any(option.partition("=")[0] == "--run_mode" for option in options):
        raise UserError(f"--run_mode: {mode} says this itself; leave it out")
    return [_own_script(), f"--run_mode={mode}", *options]


def _own_script() -> str:
    script = CHECKOUT / PACKAGED.name
    return str(script if script.is_file() else PACKAGED)
