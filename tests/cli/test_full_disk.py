"""A disk without room is told by the file that it had none for, and nothing half-written is left."""

import ctypes
import os

import numpy as np
import pytest
from tiny_chat import WORDS, conversation, save_tiny_chat_model, write_rows

from mindllm.command import run_command
from mindllm.data.indexed import IndexedWriter
from mindllm.files import atomic_open
from mindllm.main import main

QUICK = ("--context.enable_graph_kernel=false", "--context.compile_cache=false", "--runner_config.train_steps=1")
SIZE = 1 << 20


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model, conversations and text, on another disk."""
    path = tmp_path_factory.mktemp("inputs")
    save_tiny_chat_model(path / "tiny")
    write_rows(path / "chats.jsonl", map(conversation, range(30)))
    write_rows(path / "corpus.jsonl", ({"text": " ".join(WORDS * 9)} for _ in range(300)))
    return path


@pytest.fixture
def disk(tmp_path):
    """A disk of a megabyte, and a function that leaves so many kilobytes of it free."""
    place, system = tmp_path / "disk", ctypes.CDLL(None, use_errno=True)
    place.mkdir()
    if system.mount(b"none", os.fsencode(place), b"tmpfs", 0, f"size={SIZE}".encode()):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")

    def leave(kilobytes):
        (place / "other").write_bytes(b"x" * (SIZE - (kilobytes << 10)))
        return place

    yield leave
    system.umount2(os.fsencode(place), 2)  # MNT_DETACH: a log may be open


@pytest.fixture
def told(capsys):
    """Exit code and standard error of a command."""

    def call(*words):
        with pytest.raises(SystemExit) as left:
            run_command(main, [str(word) for word in words])
        return left.value.code, " ".join(capsys.readouterr().err.split())

    return call


@pytest.mark.parametrize(("free", "file"), [(0, "finetune.yaml"), (4, ".lock"), (12, "config.yaml")])
def test_a_run_without_room_names_what_it_could_not_write(free, file, inputs, disk, told):
    run = disk(free) / "run"
    code, said = told("finetune", inputs / "tiny", inputs / "chats.jsonl", "--output", run, *QUICK)
    assert code in (1, 2)
    assert "Traceback" not in said
    assert f"{run / file}" in said.rpartition("error: ")[2], said
    assert not [path for path in run.rglob(".*") if path.name != ".lock"], "no temporary file is left"


def test_a_run_without_room_for_kernels_does_not_wait_for_them(inputs, disk, told):
    run = disk(200) / "run"
    code, said = told("finetune", inputs / "tiny", inputs / "chats.jsonl", "--output", run)
    assert code == 2
    assert f"{run}/compile_cache: 0.2 MB are free, but compiled kernels need up to 16 MB; free" in said


@pytest.mark.parametrize(
    ("words", "free", "file"),
    [
        (("pretrain", "--like", "IN/tiny", "IN/corpus.jsonl", "--output", "DISK/run"), 4, "run/corpus/text.bin"),
        (("generate", "IN/tiny", "--prompt", "import", "--raw", "--output", "DISK/a.jsonl"), 4, "a.jsonl"),
        (("quantize", "IN/tiny", "DISK/int8", "--bits", "8", "--group", "8"), 30, "int8"),
        (("weights", "export", "IN/tiny", "DISK/exported"), 30, "exported"),
        (("weights", "import", "IN/tiny", "DISK/imported"), 30, "imported/llm-0"),
    ],
)
def test_a_command_without_room_names_its_file(words, free, file, inputs, disk, told):
    place = disk(free)
    code, said = told(*(word.replace("IN", str(inputs)).replace("DISK", str(place)) for word in words))
    assert code in (1, 2), said
    assert "Traceback" not in said
    assert str(place / file) in said.rpartition("error: ")[2], said
    assert not (place / file).exists() or (place / file).is_dir()
    assert not list(place.glob(".*"))


def write_corpus(prefix):
    with IndexedWriter(prefix, np.int32) as writer:
        for _ in range(8):
            writer.append(np.zeros(1 << 17, np.int32))
            writer.end_document()


def write_text(path):
    with atomic_open(path) as file:
        file.write("x" * (1 << 14))


def test_what_does_not_fit_is_told_by_the_file_it_was_for(disk):
    place = disk(8)
    with pytest.raises(OSError, match=r"No space left on device: .*/text\.bin"):
        write_corpus(place / "text")
    with pytest.raises(OSError, match=r"No space left on device: .*/a\.txt"):
        write_text(place / "a.txt")
    assert [path.name for path in place.iterdir()] == ["other"]
