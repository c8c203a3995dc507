"""The page of a graph in a real browser."""

import re
import shutil
import subprocess

import pytest

from toolkit.ir_inspect.__main__ import main

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the path")


@pytest.fixture(scope="module")
def page(kept, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "graph.html"
    main(["graph", str(kept("norms")), "--output", str(path)])
    return path


def rendered(page, search=""):
    """The page as the browser has it after its script ran."""
    profile = page.parent / "profile"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=5000",
    ]
    command = [BROWSER, *options, "--dump-dom", f"file://{page}#{search}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split('<script id="data"')[0], done.stdout


@needs_browser
def test_cells_are_boxes_and_search_finds_collectives(page):
    shown, _ = rendered(page, "layers.1.feed_forward%20tensor")
    assert re.search(r'<span id="found"[^>]*>4 found</span>', shown)
    assert shown.count('class="row collective c-tensor') == 4
    assert "<b>feed_forward</b>" in shown
    assert "<b>attention</b>" not in shown


@needs_browser
def test_what_is_recomputed_is_marked(page):
    shown, _ = rendered(page, "recomputed%20silu")
    assert re.search(r'<span id="found"[^>]*>2 found</span>', shown)
    assert len(re.findall(r'class="row  recomputed"', shown)) == 2


@needs_browser
def test_nothing_is_drawn_before_a_box_is_opened(page):
    shown, _ = rendered(page)
    assert "<b>model</b>" in shown
    assert "<b>feed_forward</b>" not in shown


def test_the_page_is_one_file_that_loads_nothing(page):
    text = page.read_text(encoding="utf-8")
    assert "http" not in text.split('<script id="data"')[0]
    assert not re.search(r'\b(src|href)="', text)
