"""The page of a graph in a real browser."""

import json
import re
import shutil
import subprocess

import pytest

from mindllm.cli.inspect import main
from mindllm.compiled.inspect.page import BUNDLED, LIBRARIES, part_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the path")


@pytest.fixture(scope="module")
def page(kept, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "graph.html"
    main(["graph", str(kept("norms")), "--output", str(path)])
    return path


def rendered(page, search="", query=""):
    """The page as the browser has it after its script ran."""
    profile = page.parent / "profile"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=5000",
    ]
    command = [BROWSER, *options, "--dump-dom", f"file://{page}{query}#{search}"]
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


def data_of(page):
    text = page.read_text(encoding="utf-8")
    begun = text.index('type="application/json">') + len('type="application/json">')
    return json.loads(text[begun : text.index("</script>", begun)])


def test_edges_lead_from_what_is_used_and_repetitions_know_their_original(page):
    rows = [row for function in data_of(page)["functions"] for row in function["rows"]]
    sources = [source for row in rows for source in row["e"]]
    assert len(sources) > len(rows)
    assert all(0 <= source < len(rows) for source in sources)
    layer = [row for row in rows if row["q"] == "model.layers.1"]
    assert {row["f"] for row in layer} >= {"forward", "recomputed", "backward"}
    repetitions = [row for row in layer if row["r2"] >= 0]
    assert repetitions
    for row in repetitions:
        first = rows[row["r2"]]
        assert (row["f"], first["f"]) == ("recomputed", "forward")
        assert (row["o"], row["q"]) == (first["o"], first["q"])
    product = next(row for row in layer if row["o"] == "MatMul" and row["f"] == "forward")
    assert any(name.endswith(".weight") for name in product["a"])


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("model.layers.12.attention.wq", "model.layers.12"),
        ("model.tok_embeddings.x", "model.tok_embeddings"),
        ("", "step"),
    ],
)
def test_what_is_drawn_together(place, part):
    assert part_of(place) == part


@needs_browser
def test_a_layer_is_drawn_with_its_exchanges_and_repetitions(page):
    rows = [row for function in data_of(page)["functions"] for row in function["rows"] if row["q"] == "model.layers.1"]
    shown, _ = rendered(page, query="?part=model.layers.1")
    drawn = re.search(
        r'<span id="drawn"[^>]*>(\d+) operators, (\d+) edges, (\d+) exchanges, (\d+) repetitions</span>', shown
    )
    operators, edges, exchanges, repetitions = map(int, drawn.groups())
    assert operators == len(rows)
    assert edges > operators
    assert exchanges == sum(bool(row["c"]) for row in rows)
    assert repetitions == sum(row["r2"] >= 0 for row in rows)
    assert "<canvas" in shown


def test_the_libraries_of_the_page_stand_beside_it_with_their_licences(page):
    text = page.read_text(encoding="utf-8")
    for name in LIBRARIES:
        assert (BUNDLED / name).read_text(encoding="utf-8") in text
    licences = {path.name for path in BUNDLED.glob("*.LICENSE.txt")}
    assert licences == {"cytoscape.LICENSE.txt", "cytoscape-dagre.LICENSE.txt", "dagre.LICENSE.txt"}
