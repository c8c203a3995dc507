"""Where commands of pages are run."""

import pytest
from page_commands import in_this_process, make_place


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with examples and configurations, and no answers that were kept before."""
    make_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)  # nobody looks: tables are as wide as they need
    return tmp_path


@pytest.fixture
def here(place, capsys):
    """Runs a command in this process; returns its exit code and everything it said."""
    return lambda command: in_this_process(command, capsys)
