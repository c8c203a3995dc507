"""How-to pages are followed as they stand, and print what they show: what takes seconds always, the rest in the slow suite.

What cannot run here says why, and is read by the parser of its command.
"""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import pytest
import yaml
from how_to_files import block_of
from how_to_pages import HOW_TO, OWN_TEST
from markdown_pages import FENCE, ROOT, blocks
from page_commands import Ran, Step, follow, in_a_shell, missing, steps
from test_pages import OURS, is_key

from mindllm.cli.registry import ALIASES, VERBS
from mindllm.cli.time import CALIBRATE, calibrate_parser

PARTS = [(page, part) for page, table in HOW_TO.items() for part in table.names()]
NOT_HERE = [(page, part) for page, table in HOW_TO.items() for part in table.not_here]
HEADINGS = re.compile(r"^[^\d:]*\w  +\w[^\d:]*$")  # the first line of a table
NAMES = {"mindllm": [], "run_llm.py": ["train"]}  # of programs, and the verbs they are


def steps_of(page: str) -> list[Step]:
    return list(steps(ROOT / "docs" / f"{page}.md"))


def commands_of(page: str) -> list[str]:
    return [command for step in steps_of(page) for command in step.commands]


def has(command: str, parts: Iterable[str]) -> bool:
    return any(part in command for part in parts)


def here_of(page: str, only_quick: bool) -> Iterator[Step]:
    """Yield the steps of a page with the commands that are run here."""
    table = HOW_TO[page]
    left_out = (*table.not_here, *(table.slow if only_quick else ()))
    for step in steps_of(page):
        if commands := [command for command in step.commands if not has(command, left_out)]:
            yield Step(commands, step.shown)


def follow_page(page: str, run: Callable[[str], Ran], only_quick: bool) -> None:
    """Run the commands of a page, and hold exit codes and what they print against it."""
    table = HOW_TO[page]
    differences = []
    for step in here_of(page, only_quick):
        figures = not any(has(command, table.estimated) for command in step.commands)
        if any(has(command, table.others) for command in step.commands):
            step = Step(step.commands, [line for line in step.shown if HEADINGS.search(line)])
        try:
            codes = follow(step, run, figures)
            assert dict(zip(step.commands, codes, strict=True)) == {name: table.code(name) for name in step.commands}
        except AssertionError as difference:  # a slow page is run once, and says all that differs
            differences.append(f"{step.commands}: {difference}")
    assert not differences, "\n\n".join(differences)


def calls_of(command: str) -> Iterator[list[str]]:
    """Yield verb and options of each call of mindllm in a command: its own, and those in quotes that it hands on."""
    words = shlex.split(command, comments=True)
    for name, verb in NAMES.items():
        if name in words:
            yield [*verb, *words[words.index(name) + 1 :]]
    for word in words:
        first, *rest = shlex.split(word.removeprefix("$(").removesuffix(")"))
        first = ALIASES.get(first, first)
        if rest and (first in VERBS or first in NAMES):
            yield [first, *rest] if first in VERBS else [*NAMES[first], *rest]
        elif rest and first == "python":
            yield from calls_of(shlex.join([first, *rest]))


def nav_of(node: object) -> Iterator[str]:
    """Yield the pages below an entry of nav."""
    if isinstance(node, str):
        yield node.removesuffix(".md")
    elif isinstance(node, list):
        for item in node:
            yield from nav_of(item)
    elif isinstance(node, dict):
        for item in node.values():
            yield from nav_of(item)


def test_every_page_of_the_section_is_followed():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    (section,) = [item["How-to"] for item in nav if "How-to" in item]
    assert {*nav_of(section), "tour", "tour_planning"} == {*HOW_TO, *OWN_TEST}


@pytest.mark.parametrize(("page", "part"), PARTS)
def test_the_table_names_commands_of_the_page(page, part):
    assert any(part in command for command in commands_of(page))


@pytest.mark.parametrize("page", HOW_TO)
def test_what_no_command_prints_is_said_to_be_so(page):
    """Each such output names the test that holds it, or why none does."""
    alone = [step.shown[0] for step in steps_of(page) if step.shown and not step.commands]
    told = HOW_TO[page].told
    assert [line for line in alone if not has(line, told)] == []
    assert [part for part in told if not any(part in line for line in alone)] == []
    named = [word for why in told.values() for word in why.split() if word.startswith("tests/")]
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(("page", "part"), NOT_HERE)
def test_what_cannot_run_here_is_read_by_the_parser_of_its_command(page, part, place):
    for command in commands_of(page):
        if part not in command:
            continue
        for verb, *options in calls_of(command):
            verb = ALIASES.get(verb, verb)
            _, rest = VERBS[verb].parser().parse_known_args(options)
            assert VERBS[verb].takes_keys or not rest, command
            assert [word for word in rest if word.startswith("--") and not is_key(word)] == [], command
        for word in command.replace('"', " ").split():
            assert not word.startswith(("configs/", "scripts/")) or (place / word).exists(), command


def option_strings(parser: ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of those below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from option_strings(below)


def calls_in_sentences(page: str) -> list[str]:
    text = FENCE.sub("", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    return re.findall(r"`mindllm ([a-z][^`\"]*)", text.replace("\n", " "))


@pytest.mark.parametrize("page", [*HOW_TO, *OWN_TEST])
def test_calls_in_sentences_have_verbs_and_options_that_there_are(page):
    for call in calls_in_sentences(page):
        verb, *words = re.split(r"[ |]", call)
        options = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
        parser = calibrate_parser() if words[:1] == [CALIBRATE] else VERBS[verb].parser()
        known = set(option_strings(parser))
        assert [option for option in options - known if not is_key(option)] == [], call


def paths(node: object, path: str = "") -> Iterator[str]:
    """Yield the dotted keys of a tree; lists are values."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from paths(value, f"{path}.{key}" if path else key)
    else:
        yield path


@pytest.mark.parametrize("page", HOW_TO)
def test_keys_of_yamls_are_keys_of_a_run(page):
    found = [yaml.safe_load(block.text) for block in blocks(ROOT / "docs" / f"{page}.md") if block.language == "yaml"]
    assert {path for tree in found for path in paths(tree)} <= OURS | {"base"}


@pytest.fixture
def files_of(place, request):
    """Writes what the commands of a page find in their directory."""

    def write(page: str, slow: bool) -> None:
        table = HOW_TO[page]
        table.files()
        if slow:
            table.slow_files()
        if table.serves:
            request.getfixturevalue("hub")(table.serves)

    return write


@pytest.mark.parametrize("page", [page for page in HOW_TO if list(here_of(page, only_quick=True))])
def test_the_quick_commands_print_what_the_page_shows(page, here, files_of):
    files_of(page, slow=False)
    follow_page(page, here, only_quick=True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "page", [page for page in HOW_TO if any(has(name, HOW_TO[page].slow) for name in commands_of(page))]
)
def test_all_commands_print_what_the_page_shows(page, files_of):
    """What stands twice on a page is run once."""
    files_of(page, slow=True)
    follow_page(page, cache(in_a_shell), only_quick=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_python_of_a_compiled_graph_gives_what_the_page_says(place):
    """A comment is what the expression before it gives, beside it or on the line above."""
    names: dict[str, object] = {}
    exec(block_of("compiled_graph", "python", 0), names)
    lines = block_of("compiled_graph", "python", 1).replace("\n# ", "  # ").splitlines()
    told = [line.partition("  # ") for line in lines]
    for code, _, value in told:
        if not value:
            exec(code, names)
        else:
            assert missing([value], repr(eval(code, names))) == [], code
    assert sum(bool(value) for _, _, value in told) == 4
