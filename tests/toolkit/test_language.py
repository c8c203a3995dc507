"""The lint of names and sentences: toolkit.language."""

import pytest

from toolkit import language
from toolkit.language import find_problems, main

OLD = '''"""A module."""


def found(rows, told=None):
    """What rows say of their own."""
    kept = 1  # once more
    raise ValueError(f"{rows}: is no row")


class Rows:
    """Rows."""

    @property
    def size(self):
        """The number of rows."""
        return 1
'''
NEW = '''"""A module."""


def read_rows(path, on_progress=None):
    """Return the rows of a file that is held out."""
    held_out = 1
    raise ValueError(f"{path}: not a row")
'''


def test_names_phrases_and_docstrings_of_the_old_style_are_reported(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(OLD)
    problems = {(problem.kind, problem.line, problem.text) for problem in find_problems(path)}
    assert problems == {
        ("name", 4, "found"),
        ("name", 4, "told"),
        ("name", 6, "kept"),
        ("phrase", 5, "of their own"),
        ("phrase", 6, "once more"),
        ("phrase", 7, "is no"),
        ("docstring", 4, "What rows say of their own."),
    }


def test_a_file_in_the_new_style_passes(tmp_path, capsys):
    path = tmp_path / "new.py"
    path.write_text(NEW)
    assert main([str(path)]) == 0
    assert not capsys.readouterr().out


def test_the_command_names_each_place_and_the_page_that_explains(tmp_path, capsys):
    path = tmp_path / "old.py"
    path.write_text(OLD)
    assert main([str(path)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert f"{path}:4: name: found" in lines
    assert lines[-1] == "7 names, phrases or docstrings to rewrite; see docs/writing.md"


def test_the_list_of_unconverted_packages_has_no_converted_one():
    """A package without problems leaves the list, so that it stays without."""
    for package in sorted(language.UNCONVERTED):
        files = [
            path for path in language.python_files([language.ROOT / package]) if language._package(path) == package
        ]
        assert files, f"{package} does not exist; remove it from UNCONVERTED"
        assert any(True for path in files for _ in find_problems(path)), f"{package} is converted; remove it"


@pytest.mark.parametrize("name", ["held_out", "write_held_out"])
def test_terms_of_the_field_are_allowed(name, tmp_path):
    path = tmp_path / "terms.py"
    path.write_text(f"{name} = 1\n")
    assert not list(find_problems(path))
