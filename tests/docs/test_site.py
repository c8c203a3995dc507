"""The site: all pages in its navigation, all public names in its API page; scripts/site_hooks.py, on small sites."""

from __future__ import annotations

import re

import pytest
from markdown_pages import ROOT

import mindllm

build = pytest.importorskip("mkdocs.commands.build")
configuration = pytest.importorskip("mkdocs.config")
pytest.importorskip("material")

YAML = "../examples/mindformers/qwen3_32b_4_layers.yaml"
HOME = f"[中文](index.zh.md)\n\n# Home\n\n[a YAML]({YAML}), [its CI](../examples/ci)\n"
HOME_ZH = f"[English](index.md)\n\n# 首页\n\n流水线\n并行：[一份 YAML]({YAML})，[代码](more.md#second-part)\n"
MORE = "# More\n\n## Second part\n\nAn end. `[code](../examples/ci)`\n\n```\n[code](../nowhere)\n```\n"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Builds a site of pages with the settings of mkdocs.yml, strictly, and returns its directory."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")

    def call(nav, **pages):
        docs, site = tmp_path / "docs", tmp_path / "site"
        docs.mkdir(exist_ok=True)
        (docs / "site.css").touch()
        for name, text in pages.items():
            (docs / f"{name.replace('_zh', '.zh')}.md").write_text(text, encoding="utf-8")
        config = configuration.load_config(
            str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(site), nav=nav, plugins=["search"], strict=True
        )
        build.build(config)
        return site

    return call


def text_of(page):
    return page.read_text(encoding="utf-8")


def settings():
    return configuration.load_config(str(ROOT / "mkdocs.yml"))


def pages_of(nav):
    """Yield the pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from pages_of(entry)


def test_every_page_is_in_the_navigation_once():
    named = list(pages_of(settings()["nav"]))
    there = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)


def test_the_api_page_has_every_public_name():
    shown = re.findall(r"^::: mindllm\.\w+\.(\w+)$", text_of(ROOT / "docs" / "api.md"), re.MULTILINE)
    assert sorted([*shown, "RunConfig"]) == sorted(mindllm.__all__)  # its keys are the configuration reference


def test_a_linked_file_of_the_repository_is_shown_by_the_site_itself(made):
    site = made(["index.md", "index.zh.md", "more.md"], index=HOME, index_zh=HOME_ZH, more=MORE)
    yaml = "repository/examples/mindformers/qwen3_32b_4_layers.yaml/"
    assert f'href="{yaml}"' in text_of(site / "index.html")
    assert f'href="../{yaml}"' in text_of(site / "zh" / "index.html")
    assert "input_sliced_sig" in text_of(site / yaml / "index.html")
    listed = text_of(site / "repository" / "examples" / "ci" / "index.html")
    assert all(f'href="{name}/"' in listed for name in ("prove_changed.sh", "gitlab_ci.yml"))
    assert "[code](../nowhere)" in text_of(site / "more" / "index.html")


def test_a_notebook_is_shown_as_prose_and_code(made):
    site = made(["index.md"], index="# Home\n\n[a notebook](../examples/prove_a_run.ipynb)\n")
    page = text_of(site / "repository" / "examples" / "prove_a_run.ipynb" / "index.html")
    assert '<h1 id="prove-a-run-from-python">' in page
    assert "cell_type" not in page


def test_a_chinese_page_speaks_chinese_and_leads_to_its_english_one(made):
    site = made(["index.md", "index.zh.md", "more.md"], index=HOME, index_zh=HOME_ZH, more=MORE)
    english, chinese = text_of(site / "index.html"), text_of(site / "zh" / "index.html")
    assert '<html lang="en"' in english
    assert '<html lang="zh"' in chinese
    assert 'href="zh/" hreflang="zh"' in english
    assert 'href=".." hreflang="en"' in chinese
    assert 'href="../more/#second-part"' in chinese
    assert "流水线并行" in chinese  # a line ends between its two words
    assert "index.zh.md" not in english  # the theme's selector stands for it


@pytest.mark.parametrize(
    ("nav", "text"),
    [
        (["index.md"], "[gone](../examples/no_such.yaml)"),
        (["index.md"], "[gone](more.md#third-part)"),
        (["index.md"], "[gone](no_such.md)"),
        (["more.md"], "a page outside nav"),
    ],
)
def test_a_dead_link_or_a_page_outside_the_navigation_fails(made, nav, text):
    with pytest.raises(BaseException, match="strict mode"):
        made([*nav, "more.md"] if nav == ["index.md"] else nav, index=f"# Home\n\n{text}\n", more=MORE)


def test_nothing_is_loaded_from_elsewhere(made):
    site = made(["index.md", "more.md"], index="# Home\n", more=MORE)
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)"', text_of(site / "index.html"))
    assert loaded == []
