"""The page of a proof: what is on it, what may not get out of it, where its links lead, and the sheets of paper that it takes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

from mindllm.cli.registry import VERBS
from mindllm.config import load_config
from mindllm.errors import Origin, Problem, UserError
from mindllm.prove import pictures
from mindllm.prove.answers import Answer, Finding, Page, Standing, Table
from mindllm.prove.page import render_page
from mindllm.prove.pieces import Options
from mindllm.prove.proof import Proof, Verdict
from mindllm.prove.prove import prove_run, refused
from mindllm.prove.questions import MEMORY, PARITY, QUESTIONS, STEP_TIME
from mindllm.prove.words import why
from mindllm.prove.write import write_proof
from mindllm.sources import PACKAGE
from mindllm.terminal.page import NAME, beside_proof, mark
from mindllm.units import GIB

SEVENTY = "configs/llama2/pretrain_llama2_70b_64p.yaml"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EMPTY = {"meta", "wbr", "rect", "img", "br"}


@pytest.fixture(scope="module")
def quick():
    """A run of 8 stages as formulas expect it."""
    return prove_run(load_config(SEVENTY), Options(), SEVENTY, quick=True)


@pytest.fixture(scope="module")
def proved(quick):
    """The same with all questions answered, memory with a table and a page."""
    return replace(quick, answers=tuple(map(as_proved, quick.answers)), complete=True)


def as_proved(answer):
    if answer.question != MEMORY:
        return replace(answer, standing=Standing.PROVED, says=f"{answer.question} is well", evidence=("as was seen",))
    stages = [stage_memory(stage["stage"]) for stage in answer.figures["stages"]]
    figures = {"limit": 58 * GIB, "peak": max(stage["peak"] for stage in stages), "stages": stages}
    table = Table("memory", ("stage", "GB"), tuple((str(stage["stage"]), "41") for stage in stages))
    page = Page("what fills the memory", "memory.html", "<p>all of it")
    return Answer(MEMORY, Standing.PROVED, "41 of 58 GB", tables=(table,), figures=figures, pages=(page,))


def stage_memory(number, size=40 * GIB):
    parts = {"fragments": GIB, "workspace": GIB, "categories": {"weights": size // 4, "activations": 3 * size // 4}}
    return {"stage": number, "used": size, "peak": size + GIB, **parts}


def changed(proof, question, **changes):
    """Return the proof with another answer to a question."""
    answers = [replace(one, **changes) if one.question == question else one for one in proof.answers]
    return replace(proof, answers=tuple(answers))


def text_of(page):
    return unescape(re.sub(r"<(style|title)>.*?</\1>|<[^>]*>", "", page, flags=re.S))


class Tree(HTMLParser):
    """Checks that all that is opened is closed, and notes elements and their attributes."""

    def __init__(self, page):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag


def test_the_verdict_with_its_reason_and_every_question_are_there(proved):
    text = text_of(render_page(proved))
    assert proved.verdict is Verdict.READY
    assert text.index("ready") < text.index(why(proved)) < text.index("Ten questions")
    places = [text.index(question.text, text.index("Ten questions")) for question in QUESTIONS.values()]
    assert places == sorted(places)
    for words in (
        proved.run.hash,
        *proved.run.words.values(),
        *(f"{key} {one}" for key, one in proved.run.versions.items()),
    ):
        assert words in text
    for question in QUESTIONS.values():
        assert question.open in text


@pytest.mark.parametrize("size", [40 * GIB, 60 * GIB])
def test_bars_of_memory_add_up_and_say_which_is_over_the_limit(size):
    drawn = pictures.memory_bars({"limit": 58 * GIB, "stages": [stage_memory(0), stage_memory(1, size)]})
    widths = [float(width) for width in re.findall(r"<i style=\"width:([\d.]+)%", drawn)]
    (limit,) = map(float, re.findall(r"left:([\d.]+)%", drawn))
    assert sum(widths[:3]) == pytest.approx(41 / 58 * limit, abs=0.01)
    assert sum(widths[3:]) == pytest.approx((size / GIB + 1) / 58 * limit, abs=0.01)
    assert ('class="bar over"' in drawn) == (size > 58 * GIB)
    assert drawn.count('class="bar') - drawn.count('class="bars') == 2


def test_time_by_cause_fills_the_step(quick):
    figures = quick.answer(STEP_TIME).figures
    rows = pictures.time_bars(figures).split('class="bar"')[1:]
    assert len(rows) == 8
    for row in rows:
        assert sum(map(float, re.findall(r"width:([\d.]+)%", row))) == pytest.approx(100, abs=0.1)


def test_the_schedule_is_the_simulated_one(quick):
    figures = quick.answer(STEP_TIME).figures
    few = {**figures, "passes": {**figures["passes"], "micro_batches": 4}}
    drawn = pictures.schedule(few)
    assert drawn.count("<rect") == 2 * 8 * 4
    ends = [float(x) + float(width) for x, width in re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%"', drawn)]
    assert max(ends) == pytest.approx(100, abs=0.01)
    assert "start" not in drawn
    many = pictures.schedule(figures)
    assert [name in many for name in ("start, ", "one period, ", "end, ")] == [True] * 3
    assert pictures.schedule({**figures, "passes": {**figures["passes"], "stages": 1}}) == ""


def test_sixty_four_stages_are_no_taller_than_sixteen():
    assert [round(count * pictures.row_height(count)[0]) for count in (1, 8, 16, 64)] == [24, 192, 288, 288]
    assert [pictures.row_height(count)[1] for count in (16, 64)] == [1, 3]


def test_what_formulas_expect_is_no_proof_and_says_so(quick):
    page = render_page(quick)
    assert 'class="verdict not-proved"' in page
    assert page.count("expected by formula") == 3
    assert "Nothing but the configuration was looked at: no proof of 9 of 10 questions" in text_of(page)
    assert "<details open" not in page


def test_a_proof_that_was_stopped_says_so(proved):
    stopped = replace(changed(proved, PARITY, standing=Standing.NOT_PROVED, says="not looked at"), complete=False)
    assert (
        why(stopped)
        == "The proof was stopped before its end: no proof of 1 of 10 questions. What formulas expect is marked so."
    )
    refuted = changed(stopped, MEMORY, standing=Standing.REFUTED, says="too much")
    assert why(refuted).startswith(f"{QUESTIONS[MEMORY].text} Too much.")
    assert why(refuted).endswith("The proof was stopped before its end.")


def test_a_refuted_question_opens_and_has_its_place_and_advice(proved):
    finding = Finding("stage 0 needs 1.95 GB more", "recompute more", "context.max_device_memory", "run.yaml", 17)
    page = render_page(changed(proved, MEMORY, standing=Standing.REFUTED, findings=(finding,)))
    text = text_of(page)
    assert 'class="verdict refuted"' in page
    for words in ("run.yaml:17", finding.key, finding.message, finding.advice):
        assert words in text
    assert page.count("<details open") == 1
    assert "<details open" in page.split(f'id="{MEMORY}"')[1].split("</article>")[0]


def test_a_question_that_may_stay_open_does_not_open(proved):
    proof = replace(changed(proved, PARITY, standing=Standing.NOT_PROVED, says="not here"), allowed=(PARITY,))
    text = text_of(render_page(proof))
    assert proof.verdict is Verdict.READY
    assert "9 of 10 questions are proved" in text
    assert "Allowed to stay open: parity" in text
    assert "not proved, and allowed to stay so: not here" in text
    assert "<details open" not in render_page(proof)


def test_a_step_is_said_with_its_range(proved):
    figures = proved.answer(STEP_TIME).figures
    for error, words in ((0.13, " ± 13%"), (None, "")):
        text = text_of(render_page(changed(proved, STEP_TIME, figures={**figures, "step_error": error})))
        assert f"a step is expected to take {figures['seconds']:.3g} s{words}" in text
        assert f"{figures['seconds']:.4g} s{words}on " in text


def test_what_was_checked_smaller_or_earlier_is_told_as_open(proved):
    proof = changed(proved, PARITY, figures={"checked": {"text": "2 of 80 layers"}}, proved_on="2026-11-20")
    text = text_of(render_page(proof)).partition("What no proof covers")[2]
    assert "smaller than the run: 2 of 80 layers" in text
    assert "proved on 2026-11-20" in text


def test_a_run_that_does_not_load_shows_its_mistakes_and_nothing_to_sign():
    problems = [
        Problem(Origin("run.yaml", line), ("parallel_config", f"key_{line}"), "is no key; write another")
        for line in range(1, 41)
    ]
    page = render_page(refused("run.yaml", UserError.of(*problems)))
    text = text_of(page)
    assert "The configuration does not load: 40 mistakes" in text
    assert text.count("is no key") == 40
    assert "and 22 more, on the screen" in text
    assert "signature" not in text


HOSTILE = "<script>alert(\"1\")</script> & 'quoted' {{data}} {{frame}}"


def test_no_text_of_a_user_becomes_markup(proved):
    finding = Finding(HOSTILE, HOSTILE, HOSTILE, f'"><img src=x onerror=alert(1)>{HOSTILE}', 3)
    table = Table(HOSTILE, (HOSTILE,), ((HOSTILE,),))
    bad = {
        "standing": Standing.REFUTED,
        "says": HOSTILE,
        "findings": (finding,),
        "evidence": (HOSTILE,),
        "tables": (table,),
    }
    proof = changed(proved, PARITY, **bad)
    words = {**proof.run.words, HOSTILE: HOSTILE}
    proof = replace(proof, run=replace(proof.run, name=HOSTILE, words=words), device=HOSTILE)
    page = render_page(proof)
    tags = {tag for tag, _ in Tree(page).seen}
    assert not tags & {"script", "img", "iframe", "link", "object"}
    assert text_of(page).count(HOSTILE) >= 12
    assert not any(name.startswith("on") for _, attributes in Tree(page).seen for name in attributes)


def test_the_page_loads_nothing(proved):
    page = render_page(proved)
    links = [attributes["href"] for _, attributes in Tree(page).seen if "href" in attributes]
    assert set(links) == {*(f"#{name}" for name in QUESTIONS), "memory.html"}
    assert not any({"src", "srcset"} & set(attributes) for _, attributes in Tree(page).seen)
    assert not re.search(r"https?:|url\(|@import", page)
    assert "default-src 'none'" in page


def test_the_commands_that_look_closer_are_commands(proved):
    commands = re.findall(r"closer: (mindllm .*?)(?=by|what|\n|$)", text_of(render_page(proved).replace("</p>", "\n")))
    assert len(commands) == sum(
        bool(question.verb) for question in QUESTIONS.values() if question.name != "configuration"
    )
    for command in commands:
        _, verb, *arguments = shlex.split(command)
        options, _ = VERBS[verb].parser().parse_known_args(arguments)
        assert SEVENTY in map(
            str, [value for item in vars(options).values() for value in (item if isinstance(item, list) else [item])]
        )


def test_links_lead_to_pages_that_are_written_and_those_of_an_earlier_proof_go(proved, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "proof"
    write_proof(proved, directory)
    assert (directory / "memory.html").read_text() == "<p>all of it"
    tree = json.loads((directory / "proof.json").read_text())
    assert tree["answers"][1]["pages"] == [{"title": "what fills the memory", "file": "memory.html", "text": ""}]
    assert Proof.of_tree(tree).to_dict() == proved.to_dict()
    (directory / "mine.html").write_text("of the user")
    write_proof(changed(proved, MEMORY, pages=()), directory)
    assert "memory.html" not in (directory / "report.html").read_text()
    assert sorted(path.name for path in directory.iterdir()) == ["mine.html", "proof.json", "report.html"]


def test_an_answer_keeps_its_pages_on_the_way_from_its_process(proved):
    answer = proved.answer(MEMORY)
    assert Answer.of_tree(json.loads(json.dumps(answer.tree()))) == replace(answer, figures=answer.figures)


def sheets(page, tmp_path):
    """Return how many sheets of paper a page takes."""
    file, paper = tmp_path / "page.html", tmp_path / "page.pdf"
    file.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    assert BROWSER
    command = [BROWSER, *options, "--no-pdf-header-footer", f"--print-to-pdf={paper}", f"file://{file}"]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the path")
def test_it_prints_on_two_sheets(proved, quick, tmp_path):
    finding = Finding("stage 0 needs 1.95 GB more", "recompute more", "context.max_device_memory", "run.yaml", 17)
    refuted = changed(proved, MEMORY, standing=Standing.REFUTED, findings=(finding,) * 30)
    refuted = changed(refuted, PARITY, standing=Standing.REFUTED, findings=(finding,) * 3)
    assert [sheets(render_page(proof), tmp_path) for proof in (proved, quick, refuted)] == [2, 2, 2]


def test_every_page_has_the_frame_and_one_beside_a_proof_leads_back(tmp_path):
    templates = [path for path in PACKAGE.rglob("*.html") if "bundled" not in path.parts]
    assert len(templates) >= 8  # they are found at all
    for template in templates:
        assert {"frame", "mark"} <= set(NAME.findall(template.read_text(encoding="utf-8"))), template
    assert not beside_proof(tmp_path)
    (tmp_path / "report.html").touch()
    assert not beside_proof(tmp_path)
    (tmp_path / "proof.json").touch()
    assert beside_proof(tmp_path)
    assert 'href="report.html"' in mark("memory", beside_proof(tmp_path))
    assert "href" not in mark("memory", aside="today")
