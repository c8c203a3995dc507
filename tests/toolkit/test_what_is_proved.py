"""The page of what is proved says what its table says, and no claim stands without a test that is there."""

from pathlib import Path

import pytest
import yaml

from mindllm.errors import CheckFailed, UserError
from toolkit.what_is_proved.__main__ import main
from toolkit.what_is_proved.page import TABLE, missing, render_page

PAGE = Path(__file__).parents[2] / "docs" / "what_is_proved.md"


@pytest.fixture
def tree(tmp_path):
    """A repository with one test, one form and one page."""
    for name, text in {
        "tests/test_a.py": "def test_x():\n    pass\n\n\nclass TestB:\n    def test_y(self):\n        pass\n",
        "mindllm/verify/forms/one.yaml": "",
        "docs/page.md": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def table(**row):
    claimed = {"claim": "It works", "holds": "yes", **row}
    return {"proved": [{"group": "All", "rows": [claimed]}], "not_proved": [{"claim": "That", "why": "no device"}]}


def test_the_page_in_the_repository_is_up_to_date():
    main(["--check", "--output", str(PAGE)])


def test_a_page_out_of_date_is_reported(tmp_path):
    page = tmp_path / "page.md"
    with pytest.raises(CheckFailed, match=r"not what what_is_proved.yaml says"):
        main(["--check", "--output", str(page)])
    main(["--output", str(page)])
    main(["--check", "--output", str(page)])


def test_a_row_shows_its_tests_forms_and_pages(tree):
    page = render_page(
        table(tests={"tests/test_a.py::test_x": "beside one device"}, forms=["o*.yaml"], pages=["page.md"]), tree
    )
    assert (
        "| It works | yes | `tests/test_a.py::test_x`: beside one device; form `o*.yaml`; [page.md](page.md) |" in page
    )
    assert "| That | no device |" in page


@pytest.mark.parametrize("test", ["tests/test_a.py", "tests/*.py", "tests", "tests/test_a.py::TestB::test_y"])
def test_a_test_that_is_there_is_accepted(test, tree):
    assert list(missing({"tests": {test: ""}}, tree)) == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "no tests; name one"),
        ({"tests": {}}, "no tests; name one"),
        ({"tests": {"tests/test_b.py": ""}}, "tests/test_b.py does not exist"),
        ({"tests": {"tests/test_a.py::test_z": ""}}, "tests/test_a.py has no test_z"),
        ({"tests": {"tests/test_a.py::TestB::test_x": ""}}, "has no TestB::test_x"),
        ({"tests": {"docs/page.md": ""}}, "docs/page.md does not exist"),
        ({"tests": {"tests/test_a.py": ""}, "forms": ["two.yaml"]}, "forms/two.yaml does not exist"),
        ({"tests": {"tests/test_a.py": ""}, "pages": ["other.md"]}, "docs/other.md does not exist"),
        ({"tests": {"tests/test_a.py": ""}, "form": ["one.yaml"]}, "unknown key 'form'"),
    ],
)
def test_a_row_that_proves_nothing_is_refused(row, problem, tree):
    with pytest.raises(UserError, match=problem):
        render_page(table(**row), tree)


def test_every_test_of_the_table_is_there():
    """Each by itself, so that all that went are named at once."""
    rows = [row for group in yaml.safe_load(TABLE.read_text(encoding="utf-8"))["proved"] for row in group["rows"]]
    assert len(rows) > 30
    assert [message for row in rows for message in missing(row, TABLE.parents[1])] == []
