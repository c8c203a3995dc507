"""What stands around the code: one version, templates that hosts can read, hooks and images that run what is there."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from markdown_pages import ROOT, dead_links

from mindllm.versions import __version__

PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
TESTS = re.compile(r"`(tests/[\w/.]+)`")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def yaml_of(name):
    return yaml.safe_load(text_of(name))


def test_the_version_is_one_everywhere():
    named = {
        "pyproject.toml": re.search(r'^version = "(.*)"$', text_of("pyproject.toml"), re.MULTILINE)[1],
        "CHANGELOG.md": re.search(r"^## (\d\S+) - \d{4}-\d\d-\d\d$", text_of("CHANGELOG.md"), re.MULTILINE)[1],
        "CITATION.cff": yaml_of("CITATION.cff")["version"],
        "configs/run.schema.json": json.loads(text_of("configs/run.schema.json"))["version"],
    }
    assert named == dict.fromkeys(named, __version__)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert list(dead_links(ROOT / page)) == []


def test_what_is_defended_is_tested_where_the_page_says():
    named = [name for page in PAGES for name in TESTS.findall(text_of(page))]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_forms_of_issues_have_what_hosts_ask_of_them(form):
    read = yaml_of(form)
    assert {"name", "description", "body"} <= set(read)
    fields = [field for field in read["body"] if field["type"] == "textarea"]
    assert len({field["id"] for field in fields}) == len(fields) >= 3
    assert all(field["attributes"]["label"] for field in fields)


def test_hooks_run_what_the_tests_run():
    hooks = [hook for repo in yaml_of(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    run = text_of("scripts/test.sh")
    commands = [command for hook in hooks for command in re.sub(r"bash -c '(.*)'", r"\1", hook["entry"]).split(" && ")]
    assert len(commands) == 5
    assert [command for command in commands if not re.search(rf"^{re.escape(command)}\b", run, re.MULTILINE)] == []


@pytest.mark.parametrize("name", ["Dockerfile", ".devcontainer/devcontainer.json"])
def test_images_install_as_the_scripts_do(name):
    text = text_of(name)
    assert "source scripts/environment.sh && use_environment" in text
    assert all((ROOT / script).is_file() for script in re.findall(r"scripts/\w+\.sh", text))
    if name.endswith(".json"):
        (schema,) = json.loads(text)["customizations"]["vscode"]["settings"]["yaml.schemas"]
        assert (ROOT / schema).is_file()
