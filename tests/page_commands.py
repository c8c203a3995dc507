"""Pages whose commands are run: their steps, what runs a command, and whether it prints what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_pages import ROOT, Block, blocks

from mindllm.command import run_command
from mindllm.main import main

LEFT_OUT = "…"
NOT_HELD = re.compile(
    r"…|^ *\d+\.\d s\b|\bin \d+\.\d s\b"  # what is left out, seconds of the clock,
    r"|\b\d{4}-\d\d-\d\d\b|\b\d\.\d+e-(?:0[5-9]|1\d)\b(?: \(.*\)$)?"  # days, errors of rounding and their places
)
LINKED = (
    "examples",
    "configs",
    "scripts",
    "research",
    "run_llm.py",
    "README.md",
    "mindllm/verify/forms",
    "tests/ground_truth",
)
Ran = tuple[int, str]  # exit code, and everything that was said


@dataclass(frozen=True)
class Step:
    """Commands as a shell reads them, and the lines that the page shows of what they print."""

    commands: list[str]
    shown: list[str]


def steps(page: Path) -> Iterator[Step]:
    """Yield the steps of a page.

    A block of bash is one; the block behind it, in the same section and without a language or commands, is what it prints.
    Elsewhere a line behind ``$`` is a command, and lines up to the next one are what it prints.
    """
    every = [*blocks(page), Block("end", "")]
    for before, block, after in zip([Block("end", ""), *every], every, every[1:], strict=False):
        shown = [line for line in block.lines() if line != LEFT_OUT]
        if block.language == "bash":
            commands = [line for line in block.lines() if shlex.split(line, comments=True)]
            yield Step(
                commands,
                [] if not _is_printed_by(block, after) else [line for line in after.lines() if line != LEFT_OUT],
            )
        elif not block.language and any(line.startswith("$ ") for line in shown):
            yield from _calls(shown)
        elif not block.language and not _is_printed_by(before, block):
            yield Step([], shown)


def _is_printed_by(block: Block, after: Block) -> bool:
    """Whether a block without commands shows what the block of bash before it prints."""
    if block.language != "bash" or after.language or block.headings != after.headings:
        return False
    return not any(line.startswith("$ ") for line in after.lines())


def _calls(lines: list[str]) -> Iterator[Step]:
    begins = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        yield Step([lines[begin][2:]], lines[begin + 1 : end])


def make_place(directory: Path) -> Path:
    """Link what a checkout has into a working directory, and make ``bin`` with the commands of this Python; return that."""
    for name in LINKED:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).symlink_to(ROOT / name)
    commands = directory / "bin"
    commands.mkdir()
    for name, call in {"mindllm": "-m mindllm ", "python": ""}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call}"$@"\n', encoding="utf-8")
        (commands / name).chmod(0o755)
    return commands


def in_this_process(command: str, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Run one call of mindllm in this process."""
    words = shlex.split(command, comments=True)
    file = words.pop() if words[-2:-1] == [">"] else None
    words = words[:-1] if file else words
    assert words[0] == "mindllm", command
    with pytest.raises(SystemExit) as left:
        run_command(main, words[1:])
    shown = capsys.readouterr()
    if file:
        Path(file).write_text(shown.out, encoding="utf-8")
    return int(left.value.code or 0), shown.out + shown.err


def in_a_shell(command: str, typed: str = "") -> Ran:
    """Run a command in a process of its own, as MindSpore has one device each; its standard input is what is typed."""
    environment = {**os.environ, "PATH": f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-c", command],
        env=environment,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout


def plain(text: str, figures: bool = True) -> str:
    """Return text without the breaks and spaces by which tables differ from one terminal to another; without figures, #."""
    return re.sub(r"\s+", " ", text if figures else re.sub(r"-?\d[\d.,]*", "#", text))


def missing(shown: list[str], said: str, figures: bool = True) -> list[str]:
    """Return the lines shown of which a part was not said."""
    printed = plain(said, figures)
    parts = {line: [plain(part, figures).strip() for part in NOT_HELD.split(line)] for line in shown}
    return [line for line, those in parts.items() if not all(part in printed for part in those)]


def follow(step: Step, run: Callable[[str], Ran], figures: bool = True) -> list[int]:
    """Run the commands of a step, hold what they print against the page, and return their exit codes."""
    answers = [run(command) for command in step.commands]
    said = "\n".join(text for _, text in answers)
    assert missing(step.shown, said, figures) == [], said
    return [code for code, _ in answers]
