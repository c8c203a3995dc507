"""Files of others: what is no regular file, or too large, is refused by name in a moment, whoever asks for it."""

import ast
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
from mindllm.evaluate.task_code import python_in
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
from mindllm.prove.found import read_proof
from mindllm.timing.device import read_device
from mindllm.timing.measured.kernel_file import profiled_step, read_kernels
from mindllm.train.checkpoint.manifest import read_manifest
from mindllm.train.checkpoint.tensors import stored_tensors
from mindllm.verify.report import read_table

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
    "rows.parquet": lambda path: list(read_records(path)),
    "task.yaml": lambda path: list(python_in(path)),
    "proof.json": read_proof,
    "table.md": read_table,
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


READERS_OF_MODULES = {
    "json": "load loads", "yaml": "load load_all safe_load safe_load_all full_load unsafe_load compose compose_all parse scan",
    "numpy": "load memmap fromfile loadtxt genfromtxt", "mmap": "mmap", "gzip": "open GzipFile", "bz2": "open BZ2File",
    "lzma": "open LZMAFile", "zstandard": "open", "zipfile": "ZipFile is_zipfile", "tarfile": "open TarFile",
    "csv": "reader DictReader", "pickle": "load loads Unpickler", "marshal": "load loads", "shelve": "open", "dbm": "open",
    "sqlite3": "connect", "tomllib": "load loads", "configparser": "ConfigParser RawConfigParser", "fileinput": "input",
    "xml.etree.ElementTree": "parse iterparse fromstring XML", "pyarrow.parquet": "ParquetFile read_table",
    "mindspore.mindrecord": "FileReader", "mindspore": "load_checkpoint load load_param_into_net", "safetensors": "safe_open",
    "safetensors.numpy": "load load_file", "tokenizers": "Tokenizer.from_file", "shutil": "copy copy2 copyfile copytree",
    "os": "open fdopen", "io": "open FileIO", "linecache": "getline getlines", "runpy": "run_path", "codecs": "open",
    "importlib.util": "spec_from_file_location", "ctypes": "CDLL", "datasets": "load_dataset", "gguf": "GGUFReader",
}  # fmt: skip
"""Functions that open or parse a file, by module."""
METHODS = ("read_text", "read_bytes", "open")
"""Methods of paths; mindllm.outside has functions of these names, which are no methods."""
ALLOWED = {
    "the one place": {
        "outside.py": "csv.DictReader gzip.GzipFile json.loads open os.open",
    },
    "opened, or found to be a regular file of the right size, by mindllm.outside or its caller first": {
        "compiled/graph/file.py": ".open numpy.load zipfile.ZipFile",
        "data/corpus.py": "numpy.load",
        "data/indexed.py": "numpy.memmap",
        "data/mind_record.py": "mindspore.mindrecord.FileReader",
        "data/preprocess/pieces.py": "open",
        "data/records.py": "bz2.open csv.DictReader gzip.open lzma.open pyarrow.parquet.ParquetFile zstandard.open",
        "gguf/model.py": "numpy.fromfile",
        "weight_files/gguf_file.py": "numpy.fromfile",
        "weight_files/pickled.py": "numpy.fromfile numpy.memmap zipfile.ZipFile",
        "train/checkpoint/tensors.py": "mmap.mmap numpy.fromfile numpy.memmap",
    },
    "parses a text that mindllm.outside has read, or an option, a request or an answer of bounded size": {
        "cli/evaluate.py": "yaml.safe_load",
        "config/reading/shipped.py": "json.loads yaml.load",
        "data/chat/template_program.py": "json.loads",
        "data/tokenizers/tokenizer.py": "json.loads",
        "evaluate/task_code.py": "yaml.compose",
        "launch/clusters/kubernetes_job.py": "json.loads",
        "launch/layouts.py": "yaml.safe_load",
        "train/checkpoint/store.py": "json.loads",
    },
    "files of this package, of an installed one, or of the program that runs": {
        "compiled/device/elf.py": ".read_bytes",
        "compiled/device/front_end.py": "ctypes.CDLL",
        "compiled/device/parsed_sources.py": ".read_text json.loads",
        "compiled/device/stand_in.py": ".read_text",
        "compiled/device/stand_in_names.py": "ctypes.CDLL",
        "compiled/device/wheel.py": "json.loads open",
        "compiled/graph/mind_ir.py": "importlib.util.spec_from_file_location",
        "compiled/inspect/page.py": ".read_text",
        "sources.py": ".read_bytes",
        "programs/command_line.py": "open",
        "dry_run/source_lines.py": ".read_text json.loads",
        "evaluate/run.py": ".read_text",
        "evaluate/tasks/first_line.py": ".read_text datasets.load_dataset yaml.safe_load",
        "evaluate/tasks/scoring.py": ".read_text datasets.load_dataset",
        "generate/graphs/library.py": ".read_bytes .read_text ctypes.CDLL",
        "generate/host.py": "ctypes.CDLL",
        "mindformers/directory.py": ".read_text",
        "terminal/page.py": ".read_text",
    },
    "what a process of this command writes or sends": {
        "compiled/device/callback_thread.py": "ctypes.CDLL",
        "programs/inside_program.py": ".read_bytes ctypes.CDLL json.loads",
        "programs/environment.py": ".read_bytes .read_text json.loads",
        "compiled/rank/compile_rank.py": ".read_text open",
        "compiled/rank/compile_ranks.py": ".read_bytes .read_text shutil.copyfile",
        "compiled/simulation/simulate_rank.py": ".read_text",
        "compiled/simulation/memory_tracker.py": ".read_text csv.reader open",
        "data/tokenizers/probe_program.py": "json.load",
        "programs/memory.py": "open",
        "dry_run/simulations.py": ".read_text",
        "evaluate/code.py": "open",
        "evaluate/outcome.py": ".read_text json.loads",
        "generate/outcome.py": ".read_text json.loads",
        "jobs/pool.py": ".read_bytes .read_text json.loads",
        "jobs/ray_cluster.py": ".read_bytes",
        "jobs/worker.py": ".read_text json.loads",
        "jobs/process.py": ".read_text ctypes.CDLL open",
        "launch/job.py": "open",
        "planning/several_chunks/bound_process.py": ".read_text",
        "prove/run_pieces.py": ".read_text json.loads",
        "run/outcome.py": ".read_text json.loads",
        "train/callbacks/profiler.py": ".read_text json.loads",
    },
    "files of the job in its output directory, which its ranks and launchers write": {
        "data/preprocess/resume.py": ".read_bytes open",
        "launch/heartbeat.py": "os.open",
        "launch/secret.py": "os.open",
        "preflight/network.py": ".read_text",
        "preflight/node.py": ".read_bytes",
        "train/job/output_directory.py": ".read_bytes json.loads open",
        "train/job/restart.py": ".read_bytes",
        "train/metrics_file.py": "open",
    },
    "the system: /proc, control groups, drivers; and what bounds a program of others": {
        "evaluate/code_calls.py": "json.loads os.fdopen",
        "evaluate/code_child.py": "ctypes.CDLL json.loads os.open runpy.run_path",
        "preflight/versions.py": ".read_text",
        "jobs/cores.py": "os.open",
        "process/guard.py": "mmap.mmap os.open",
        "jobs/memory.py": ".read_text json.loads os.open",
        "process/temporary.py": ".read_text os.open",
        "train/job/preflight.py": ".read_text",
    },
    "writes, with a mode that its caller gives, and syncs": {
        "files.py": "open os.open",
    },
}
"""Calls that read files in mindllm/, by the reason why mindllm.outside does not open them, and by file."""


def called(tree: ast.AST) -> set[str]:
    """Return the names of functions called in a module that open or parse a file, without those that only write."""
    modules, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(one.asname or one.name.partition(".")[0]): (one.name if one.asname else one.name.partition(".")[0])
                        for one in node.names}  # fmt: skip
        if isinstance(node, ast.ImportFrom):
            modules |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = dotted_name(node.func, modules)
        module, _, function = name.rpartition(".")
        known = any(name in (f"{one}.{each}" for each in names.split()) for one, names in READERS_OF_MODULES.items())
        is_method = isinstance(node.func, ast.Attribute) and function in METHODS and module != "mindllm.outside"
        if (known or is_method or name == "open") and not only_writes(node):
            found.add(name if known or name == "open" else f".{function}")
    return found


def dotted_name(function: ast.expr, modules: dict[str, str]) -> str:
    """Return ``np.load`` as ``numpy.load``; what is not a name has none."""
    if isinstance(function, ast.Name):
        return modules.get(function.id, function.id)
    if isinstance(function, ast.Attribute):
        return f"{dotted_name(function.value, modules)}.{function.attr}"
    return ""


def only_writes(call: ast.Call) -> bool:
    """Return True for a call with a mode, or flags, that write; and for the library of the running process."""
    words = [
        each.value for each in (*call.args, *(one.value for one in call.keywords)) if isinstance(each, ast.Constant)
    ]
    modes = [word for word in words if isinstance(word, str) and re.fullmatch(r"[rwxab+t]{1,3}", word)]
    flags = ast.unparse(call)
    writes = any(re.search("[wxa]", mode) and "+" not in mode for mode in modes) or "O_WRONLY" in flags
    return writes or flags == "ctypes.CDLL(None)"


def test_nothing_else_reads_files():
    """A reader of a file of others goes through ``mindllm.outside``; every other reader is listed, with its reason.

    For a new one: use a function of ``mindllm.outside``, or say here why the file is not of others.
    """
    package = ROOT / "mindllm"
    found = {
        str(path.relative_to(package)): names
        for path in sorted(package.rglob("*.py"))
        if (names := called(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == {file: set(names.split()) for files in ALLOWED.values() for file, names in files.items()}


SHARED_PLACES = re.compile(r"gettempdir\(|XDG_RUNTIME_DIR|TMPDIR\"\]|getenv\(.TMPDIR|[\"'](/var)?/tmp\b|[\"']/dev/shm")
OF_SHARED_PLACES = {
    "jobs/memory.py": "opened by open_private_directory",
    "launch/clusters/kubernetes_job.py": "a mount of a pod",
}


def test_nothing_else_names_a_file_in_a_shared_directory():
    """Another user may have made a fixed name there: use ``process.temporary``, which draws names or checks the owner."""
    package = ROOT / "mindllm"
    found = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if SHARED_PLACES.search(path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(OF_SHARED_PLACES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from pathlib import Path\nPath(x).read_text()", {".read_text"}),
        ("import json as j\nj.loads(x)", {"json.loads"}),
        ("from numpy import load as l\nl(x)", {"numpy.load"}),
        ("def f():\n    import pyarrow.parquet as p\n    p.ParquetFile(x)", {"pyarrow.parquet.ParquetFile"}),
        ("open(x)", {"open"}),
        ("x.open('r+b')", {".open"}),
        ("open(x, 'wb'); x.open('a'); open(x, mode='x')", set()),
        ("from mindllm import outside\noutside.read_text(x)", set()),
        ("from mindllm.outside import read_text, open_file\nread_text(x); open_file(x)", set()),
        ("import os\nos.open(x, os.O_RDONLY)", {"os.open"}),
        ("import os\nos.open(x, os.O_WRONLY | os.O_CREAT)", set()),
    ],
)
def test_readers_are_recognised(text, expected):
    assert called(ast.parse(text)) == expected


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
        with pytest.raises(ValueError, match=r"tensor t has the invalid description"):
            stored_tensors(tmp_path / "x.safetensors")
