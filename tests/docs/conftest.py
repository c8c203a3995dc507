"""Where commands of pages are run."""

import os
from pathlib import Path

import pytest
from local_hub import local_hub
from page_commands import Ran, in_a_shell, in_this_process, make_place


@pytest.fixture(autouse=True)
def _own_environment():
    """Options of commands that are read in this process are for processes they start, as variables: not for other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


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
    """Runs a command in this process, or in one that reads an address of a hub; returns its exit code and what it said."""

    def run(command: str) -> Ran:
        is_ours = command.startswith("mindllm") and not command.startswith("mindllm fetch")
        return in_this_process(command, capsys) if is_ours else in_a_shell(command)

    return run


class AnyName(str):
    """The name of a repository that is every other one, too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@pytest.fixture
def hub(place, monkeypatch):
    """Hugging Face's hub and ModelScope on this machine: each repository has the model of the page, and a GGUF file."""
    with local_hub() as found:
        found.repository = AnyName("Qwen/Qwen2.5-0.5B-Instruct")
        found.files = {"tiny.Q4_K_M.gguf": b"GGUF"}
        for name, value in {"HF_ENDPOINT": found.url, "MODELSCOPE_ENDPOINT": found.url, "NO_PROXY": "*"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)

        def serve(directory: str) -> None:
            found.files |= {path.name: path.read_bytes() for path in Path(directory).iterdir()}

        yield serve
