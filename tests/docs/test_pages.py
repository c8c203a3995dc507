"""README, landing page and tutorials: short, with live links, commands that parse, and the same in both languages."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from markdown_pages import ROOT, blocks, commands, dead_links, words
from page_commands import steps

from mindllm.cli.registry import ALIASES, VERBS
from mindllm.config.reading.schema import walk
from mindllm.config.run import RunConfig
from mindllm.mindformers.reader import KEYS
from mindllm.shorthands import SHORTHANDS

README, README_ZH = ROOT / "README.md", ROOT / "README_zh.md"
TUTORIALS = sorted([*(ROOT / "docs" / "tutorials").glob("*.md"), *(ROOT / "docs").glob("index*.md")])
ENGLISH = [README, *(page for page in TUTORIALS if not page.name.endswith(".zh.md"))]
CHINESE = [README_ZH, *(page for page in TUTORIALS if page.name.endswith(".zh.md"))]
PAGES = sorted([README, README_ZH, *(ROOT / "docs").rglob("*.md")])
OURS = {".".join(map(str, path)) for path, _, _ in walk(RunConfig)}


def name_of(page):
    return str(page.relative_to(ROOT))


def twin(page):
    """Return the page in the other language."""
    return README_ZH if page == README else page.with_suffix(".zh.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    assert list(dead_links(page)) == []


@pytest.mark.parametrize("page", [README, README_ZH], ids=name_of)
def test_readme_is_short_and_its_first_screen_has_a_proof(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert any("docs/proof.png" in line for line in lines[:10])
    assert any("mindllm prove" in line for line in lines[:10])


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_both_languages_link_each_other_and_have_the_same_commands_and_outputs(page):
    other = twin(page)
    assert page.read_text(encoding="utf-8").startswith(f"[中文]({other.name})\n")
    assert other.read_text(encoding="utf-8").startswith(f"[English]({page.name})\n")
    assert commands(other) == commands(page) != []
    shown = [[block.text for block in blocks(one) if block.language != "bash"] for one in (page, other)]
    assert shown[0] == shown[1]


def test_every_chinese_page_has_an_english_one():
    assert [twin(page) for page in ENGLISH] == CHINESE


@pytest.mark.parametrize("page", ENGLISH, ids=name_of)
def test_sentences_are_short(page):
    """A sentence of README or a tutorial has at most 30 words."""
    text = re.sub(r"^```.*?^```$", ".", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(\||#|<|\[).*$", ".", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", " x ", text)
    sentences = re.split(r"[.?!:](?:\*\*)?\s|\n\n|\n- ", text)
    assert [sentence for sentence in sentences if len(re.findall(r"\w[\w'-]*", sentence)) > 30] == []


@pytest.mark.parametrize("page", [*ENGLISH, ROOT / "docs" / "what_is_proved.md"], ids=name_of)
def test_every_verb_is_one_of_ours(page):
    named = re.findall(r"`mindllm ([a-z][\w-]*)", page.read_text(encoding="utf-8"))
    assert [verb for verb in named if verb not in (*VERBS, *ALIASES)] == []


def calls():
    """Return every call of mindllm in README and below docs/, once; not those that a page shows to be wrong."""
    pages = [page for page in PAGES if page.name != "errors.md" and page not in CHINESE]
    every = [
        step for page in pages for step in steps(page) if not step.shown[:1] or not step.shown[0].startswith("error: ")
    ]
    found = [words(command) for step in every for command in step.commands]
    return sorted({tuple(call[1:]) for call in found if call[0] == "mindllm" and call[1] != "completion"})


def is_key(word):
    """Whether an option is a key of a run, ours or MindFormers', or a shorthand."""
    name = word.removeprefix("--").partition("=")[0]
    return name in OURS or name in SHORTHANDS or name in KEYS


@pytest.mark.parametrize("call", calls(), ids=" ".join)
def test_every_call_parses(call, tmp_path, monkeypatch):
    """A misspelt verb, option or key fails here."""
    monkeypatch.chdir(tmp_path)
    verb, *words = call
    verb = ALIASES.get(verb, verb)
    _, rest = VERBS[verb].parser().parse_known_args(words)
    assert not rest or VERBS[verb].takes_keys
    keys = [word for before, word in pairwise(["", *rest]) if word.startswith("--") or not before.startswith("--")]
    assert [word for word in keys if not is_key(word)] == []


def test_the_reading_list_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page[page.index("## Five files") : page.index("## Packages")]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", section)
    there = [f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in (ROOT / "mindllm").rglob("*")]
    assert len(names) > 25
    assert [name for name in names if not any(path.endswith(f"/{name}") for path in there)] == []
