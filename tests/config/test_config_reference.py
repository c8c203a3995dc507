"""The reference page says what the schema says."""

from pathlib import Path

import pytest

from mindllm.config.reading.schema import walk
from mindllm.config.run import RunConfig
from mindllm.errors import CheckFailed
from toolkit.config_reference.__main__ import main
from toolkit.config_reference.page import render_page

PAGE = Path(__file__).parents[2] / "docs" / "config_reference.md"


def test_the_page_in_the_repository_is_up_to_date():
    main(["--check", "--output", str(PAGE)])


def test_every_key_is_described_and_on_the_page():
    page = render_page()
    for path, info, _ in walk(RunConfig):
        assert info.description, path
        assert f"| `{path[-1]}` |" in page
        if len(path) > 1:
            assert f"## `{'.'.join(path[:-1])}`" in page


def test_a_page_out_of_date_is_reported(tmp_path):
    page = tmp_path / "docs" / "page.md"
    with pytest.raises(CheckFailed, match="not what the schema says"):
        main(["--check", "--output", str(page)])
    main(["--output", str(page)])
    main(["--check", "--output", str(page)])
    page.write_text(page.read_text().replace("`seed`", "`sed`"))
    with pytest.raises(CheckFailed):
        main(["--check", "--output", str(page)])
