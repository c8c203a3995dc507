"""Files of others: what is no regular file, or too large, is refused by name in a moment, whoever asks for it."""

import gzip
import json
import os
import re
import socket
from pathlib import Path

import pytest

from mindllm.compiled.inspect.source import read_graph
from mindllm.compiled.simulation.simulation import load_simulation
from mindllm.config import load_config
from mindllm.data.indexed import IndexedDataset
from mindllm.data.records import read_records
from mindllm.data.tokenizers.tokenizer import load_tokenizer
from mindllm.errors import UserError
from mindllm.families.hugging_face import read_model_config
from mindllm.outside import (
    FileRefusedError,
    open_file,
    parse_json,
    read_bytes,
    read_compressed_json,
    read_json,
    read_rows,
    read_text,
)
from mindllm.planning.read_problem import read_problem
from mindllm.timing.device import read_device
from mindllm.timing.measured.kernel_file import profiled_step, read_kernels
from mindllm.train.checkpoint.manifest import read_manifest
from mindllm.train.checkpoint.tensors import stored_tensors

ROOT = Path(__file__).parents[1]
MOST = 1000
READERS = {
    "run.yaml": load_config,
    "config.json": lambda path: read_model_config(path.parent),
    "tokenizer.json": load_tokenizer,
    "manifest.json": lambda path: read_manifest(path.parent),
    "simulation.json.gz": load_simulation,
    "rows.jsonl": lambda path: list(read_records(path)),
    "rows.csv.gz": lambda path: list(read_records(path)),
    "problem.json": read_problem,
    "kernel_details.csv": read_kernels,
    "step_trace_time.csv": profiled_step,
    "device.yaml": lambda path: read_device(str(path)),
    "graph.mindir": read_graph,
}


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def listening(path):
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))  # a path of a socket is short


def loop(path):
    path.symlink_to(path.name)


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("make", [fifo, device, listening, loop, sparse, Path.mkdir])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused(name, make, tmp_path):
    make(tmp_path / name)
    with pytest.raises((UserError, OSError), match=re.escape(str(tmp_path))) as refused:
        READERS[name](tmp_path / name)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("make", [fifo, device, sparse])
def test_a_base_is_a_file_too(make, tmp_path):
    make(tmp_path / "base.yaml")
    (tmp_path / "run.yaml").write_text("seed: 1\nbase: base.yaml\n")
    with pytest.raises(UserError, match=r"run\.yaml:2: base: .*base\.yaml: cannot be read: "):
        load_config(tmp_path / "run.yaml")


def test_bases_that_never_end(tmp_path):
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for number in range(30):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    (tmp_path / "run.yaml").write_text("base: loop.yaml\n")
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        load_config(tmp_path / "run.yaml")
    with pytest.raises(UserError, match="this is base number 21; at most 20 are read"):
        load_config(tmp_path / "0.yaml")


def test_the_kind_of_what_is_no_file_is_said(tmp_path):
    for make, kind in ((fifo, "a FIFO"), (device, "a device"), (Path.mkdir, "a directory")):
        make(tmp_path / make.__name__)
        with pytest.raises(FileRefusedError, match=f"^is {kind}, not a file$"):
            open_file(tmp_path / make.__name__)
    with pytest.raises(FileRefusedError, match="is no path"):
        open_file("a\0b")
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "nowhere")


def test_a_pipe_that_the_shell_hands_over_is_read():
    reader, writer = os.pipe()
    os.write(writer, b'{"a": 1}')
    os.close(writer)
    assert read_json(f"/dev/fd/{reader}") == {"a": 1}
    os.close(reader)


def test_sizes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * MOST)
    assert read_bytes(path, MOST) == b"x" * MOST
    with pytest.raises(FileRefusedError, match=r"has 1,000 bytes; at most 999 are read"):
        read_bytes(path, MOST - 1)
    with pytest.raises(FileRefusedError, match=r"at most 10 are read"):
        read_bytes("/proc/self/maps", 10)  # it says that it has none


def test_a_compressed_file_is_bounded_once_decompressed(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b" " * 100_000 + b"1"))
    assert read_compressed_json(path) == 1
    with pytest.raises(FileRefusedError, match=r"more than 1,000 bytes once decompressed"):
        read_compressed_json(path, MOST)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(FileRefusedError, match="not a compressed file, or damaged"):
        read_compressed_json(path)


def test_text_says_where_it_is_none(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one\r\ntwo\rthree\n")
    assert read_text(path) == "one\ntwo\nthree\n"
    path.write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(FileRefusedError, match=r"not a text file in UTF-8 \(line 2, byte 0xff\)"):
        read_text(path)


def test_rows(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text('a,b\n1,"x\ny"\n2\n')
    assert read_rows(path) == [{"a": "1", "b": "x\ny"}, {"a": "2", "b": ""}]
    path.write_text('a,b\n1,"open\n')
    with pytest.raises(FileRefusedError, match="unexpected end of data"):
        read_rows(path)


@pytest.mark.parametrize("deep", [201, 990, 100_000])
@pytest.mark.parametrize("ends", ["[]", ("{{", "}}")])
def test_json_that_is_nested_too_deeply(deep, ends):
    opening, closing = ("[", "]") if ends == "[]" else ('{"a":', "}")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(opening * deep + "1" + closing * deep)
    assert json.dumps(parse_json(opening * 200 + "1" + closing * 200))


DIRECT = re.compile(
    r"(?<!outside)\.read_(text|bytes)\(|(?<![\w.])open\(|(?<!os)\.open\(|json\.load|yaml\.(safe_)?load|gzip\.open|np\.load\(|csv\.(reader|Dict)"
)
ALLOWED = {
    "mindllm/outside.py": "the one place",
    "mindllm/process/temporary.py": "/proc",
    "mindllm/files.py": "writes",
    "mindllm/terminal/page.py": "our own templates",
    "mindllm/compiled/rank/server_process.py": "logs of processes of ours",
    "mindllm/compiled/rank/compile_ranks.py": "what a process of ours has just written",
    "mindllm/prove/": "answers that this user keeps, and that processes of ours have just written; writes",
    "mindllm/compiled/device/": "files of the installed MindSpore, and what a process of ours has written",
    "mindllm/compiled/graph/file.py": "a part of an archive, read with bounds",
    "mindllm/compiled/simulation/memory_tracker.py": "what MindSpore has just written in a directory of ours",
    "mindllm/compiled/foreign/environment.py": "what a program that we run has just written in a directory of ours",
    "mindllm/compiled/simulation/somas.py": "what MindSpore has just written in a directory of ours",
    "mindllm/compiled/simulation/forked.py": "what a process of ours has just written",
    "mindllm/compiled/simulation/simulation.py": "writes",
    "mindllm/compiled/rank/worker.py": "what a process of ours has just written",
    "mindllm/mindformers/directory.py": "a shipped YAML",
    "mindllm/data/corpus.py": "writes; and a memory map of an array, whose header numpy bounds",
    "mindllm/data/indexed.py": "writes",
    "mindllm/data/records.py": "decompresses what mindllm.outside opened, line by line",
    "mindllm/data/chat/template_program.py": "JSON of a process of ours",
    "mindllm/data/tokenizers/tokenizer.py": "JSON that the library has taken",
    "mindllm/config/reading/shipped_models.py": "parses our own YAMLs, read by mindllm.outside",
    "mindllm/fetch/": "writes, and what it has written before it was interrupted",
    "mindllm/evaluate/": "files of the harness, and answers that this tool has kept, line by line",
    "mindllm/generate/outcome.py": "answers that a process of ours has just written",
    "mindllm/run/outcome.py": "metrics that a process of ours has just written",
    "mindllm/generate/graphs/library.py": "our source, /proc",
    "mindllm/process/host_memory.py": "/proc and /sys, and claims that tools of this user have made",
    "mindllm/launch/": "logs, beats and lines of processes of ours",
    "mindllm/planning/several_chunks/": "JSON of a process of ours",
    "mindllm/train/": "writes, and what ranks of this run have just written",
    "toolkit/benchmark/": "compares programs; reads what it has written",
    "mindllm/verify/report.py": "a table this tool writes",
    "toolkit/_generated_page.py": "a page that a tool writes",
    "toolkit/what_is_proved/": "a table of the repository",
    "mindllm/data/preprocess/": "its own unfinished work",
    "mindllm/dry_run/": "/proc, sources of ours, what its workers and programs have written, the first line of a script",
    "mindllm/cli/use/evaluate.py": "an option",
    "mindllm/cli/prove/offline.py": "a copy of bytes",
    "mindllm/compiled/inspect/page.py": "bundled scripts",
    "mindllm/preflight/": "/proc, and a file it has just written",
    "mindllm/strategies/search.py": "what it has kept",
}


def test_nothing_else_opens_files():
    """A new reader of a file from outside goes through ``mindllm.outside``; what reads only our own is named above."""
    found = {
        str(path.relative_to(ROOT))
        for room in ("mindllm", "toolkit")
        for path in (ROOT / room).rglob("*.py")
        if DIRECT.search(path.read_text(encoding="utf-8"))
    }
    strangers = [name for name in sorted(found) if not name.startswith(tuple(ALLOWED))]
    unused = [place for place in ALLOWED if not any(name.startswith(place) for name in found)]
    assert (strangers, unused) == ([], [])


def test_indexes_say_their_size(tmp_path):
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\4" + b"\xff" * 16)
    (tmp_path / "x.bin").touch()
    with pytest.raises(UserError, match="its header describes"):
        IndexedDataset(tmp_path / "x")
    header = json.dumps({"t": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(ValueError, match="tensor t"):
        stored_tensors(tmp_path / "x.safetensors")
    for shape, offsets in (("[Infinity]", "[0, 4]"), ("[1]", "[Infinity, 4]")):
        endless = f'{{"t": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}'.encode()
        (tmp_path / "x.safetensors").write_bytes(len(endless).to_bytes(8, "little") + endless + b"1234")
        with pytest.raises(ValueError, match=r"tensor t .* not understood"):
            stored_tensors(tmp_path / "x.safetensors")
