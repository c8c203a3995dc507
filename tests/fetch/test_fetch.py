"""mindllm fetch against a server that speaks both hubs' protocols: whole or absent, checked, continued after a kill."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from mindllm.config.reading.shipped import shipped_models
from mindllm.errors import RunFailed, UserError
from mindllm.fetch import directory as fetching
from mindllm.fetch.directory import fetch as write
from mindllm.fetch.hub import PUBLISHED, PUBLISHED_ON_MODELSCOPE
from mindllm.fetch.huggingface import HuggingFace
from mindllm.fetch.listing import RemoteFile, choose_files
from mindllm.fetch.modelscope import ModelScope

pytest.importorskip("huggingface_hub")

from local_hub import COMMIT, local_hub

ROOT = Path(__file__).parents[2]
LARGE = np.random.default_rng(0).bytes(24 << 20)  # the client writes pieces of 10 MB
SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 2000,
    "README.md": b"# A model",
    "LICENSE": b"Apache",
    "modeling_own.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle" * 1000,
    ".gitattributes": b"",
}
WANTED = ["LICENSE", "README.md", "config.json", "model.safetensors", "tokenizer.json"]


HUBS = {"huggingface": HuggingFace(), "modelscope": ModelScope()}


@pytest.fixture(params=HUBS)
def hub(request, monkeypatch):
    """A local hub, asked in one protocol and in the other: ``hub.spoken``."""
    from huggingface_hub import constants

    with local_hub() as hub:
        hub.files = {**SMALL, "model.safetensors": LARGE[:50_000]}
        hub.spoken = request.param
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which other tests set for their process
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
        yield hub


def list_files(hub, repository="org/model", *arguments, **options):
    return HUBS[hub.spoken].list_files(repository, *arguments, **options)


def fetch(hub, listing, *arguments):
    return write(HUBS[hub.spoken], listing, *arguments)


def command(spoken, url, *arguments):
    environment = {**os.environ, "HF_ENDPOINT": url, "MODELSCOPE_ENDPOINT": url, "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": "2", "MODELSCOPE_DOWNLOAD_TIMEOUT": "2"}
    environment |= {"NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "mindllm", "fetch", "--from", spoken, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def names(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_a_directory_is_fetched_without_pickles_and_code(hub, tmp_path):
    listing = list_files(hub)
    commit = COMMIT if hub.spoken == "huggingface" else None  # ModelScope does not say it
    assert (listing.license, listing.commit, listing.unchecked) == ("apache-2.0", commit, [])
    told = []
    written = fetch(hub, listing, tmp_path / "model", lambda *progress: told.append(progress))
    assert names(written) == WANTED
    assert all((written / name).read_bytes() == hub.files[name] for name in WANTED)
    assert told[-1] == ("fetching", listing.size, listing.size)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left beside it"
    with pytest.raises(UserError, match="already exists"):
        fetch(hub, listing, tmp_path / "model")


def test_hugging_faces_own_client_reads_the_same_files(hub):
    from huggingface_hub import HfApi

    if hub.spoken == "modelscope":
        pytest.skip("test_modelscope.py has its client")
    info = HfApi(endpoint=hub.url).model_info("org/model", files_metadata=True)
    theirs = {(file.rfilename, file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in info.siblings}
    listing = list_files(hub, include=["*"])
    assert {(file.name, file.size, file.digest) for file in listing.files} == theirs
    assert (listing.commit, listing.license) == (info.sha, info.card_data.license)


def half_way(hub, tmp_path):
    """A command that has 10 MiB of a file whose rest does not come, and the directory that has them."""
    hub.files["model.safetensors"] = LARGE
    hub.stall["model.safetensors"] = 15 << 20
    process = command(hub.spoken, hub.url, "org/model", "--output", tmp_path / "model")
    kept = tmp_path / ".model.fetch"
    deadline = time.monotonic() + 60
    while sum(path.stat().st_size for path in kept.glob("model.safetensors*")) < 10 << 20:
        assert time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return process, kept


def test_a_kill_in_the_middle_goes_on_where_it_was(hub, tmp_path):
    process, kept = half_way(hub, tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "model").exists()
    (there,) = (path.stat().st_size for path in kept.glob("model.safetensors*"))
    hub.stall.clear()
    hub.requests.clear()
    done = command(hub.spoken, hub.url, "org/model", "--output", tmp_path / "model", "--json")
    out, err = done.communicate(timeout=100)
    assert done.returncode == 0, err
    told = json.loads(out)
    assert (told["schema"], told["hub"], told["licence"]) == (1, hub.spoken, "apache-2.0")
    assert told["revision"] == (COMMIT if hub.spoken == "huggingface" else "master")
    assert sorted(told["files"]) == WANTED
    assert "license: apache-2.0" in err
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == LARGE
    asked = {path.rpartition("/")[2]: piece for method, path, piece in hub.requests if method == "GET"}
    assert asked["model.safetensors"] == f"bytes={there}-"
    assert "config.json" not in asked, "what was whole is not asked for again"


def test_an_interrupt_ends_with_130_and_is_continued(hub, tmp_path):
    process, _ = half_way(hub, tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    hub.stall.clear()
    listing = list_files(hub)
    assert (fetch(hub, listing, tmp_path / "model") / "model.safetensors").read_bytes() == LARGE


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_corrupted_file_is_refused_and_fetched_anew(name, hub, tmp_path):
    hub.served[name] = b"?" + hub.files[name][1:]
    with pytest.raises(RunFailed, match=rf"{name} of org/model: checksum .* is not the hub's .*: corrupted; removed"):
        fetch(hub, list_files(hub), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    hub.served.clear()
    fetch(hub, list_files(hub), tmp_path / "model")
    assert (tmp_path / "model" / name).read_bytes() == hub.files[name]


def test_a_server_that_does_not_continue_sends_all(hub, tmp_path):
    kept = tmp_path / ".model.fetch"
    kept.mkdir()
    listing = list_files(hub)
    weights = next(file for file in listing.files if file.name == "model.safetensors")
    (kept / f"model.safetensors.{weights.sha256[:16]}.incomplete").write_bytes(b"x" * 100)
    hub.continues = False
    fetch(hub, listing, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == LARGE[:50_000]


def test_what_was_kept_of_another_commit_goes(hub, tmp_path):
    kept = tmp_path / ".model.fetch"
    kept.mkdir()
    (kept / "old.safetensors").write_bytes(b"old")
    (kept / "config.json").write_bytes(b"other")
    assert names(fetch(hub, list_files(hub), tmp_path / "model")) == WANTED
    assert (tmp_path / "model" / "config.json").read_bytes() == SMALL["config.json"]


def test_a_full_disk_is_told_before_anything_is_fetched(hub, tmp_path, monkeypatch):
    free = namedtuple("Usage", "total used free")(1, 1, 101 << 20)
    hub.files["model.safetensors"] = LARGE
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    listing = list_files(hub)
    hub.requests.clear()
    with pytest.raises(RunFailed, match=r"not enough space: 0\.03 GB to fetch, 0\.11 GB free"):
        fetch(hub, listing, tmp_path / "model")
    assert hub.requests == []


class FillingDisk(io.FileIO):
    """A file on a disk that has room for one megabyte of it."""

    room = 1 << 20

    def write(self, data):
        if self.tell() >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[: self.room - self.tell()])


def test_a_disk_that_fills_while_a_file_is_written_is_told_and_continued(hub, tmp_path, monkeypatch):
    hub.files["model.safetensors"] = LARGE
    listing = list_files(hub)
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "open", lambda path, mode, **_: FillingDisk(path, mode), raising=False)
        with pytest.raises(RunFailed) as told:
            fetch(hub, listing, tmp_path / "model")
    (kept,) = (tmp_path / ".model.fetch").glob("model.safetensors*")
    assert str(told.value).startswith(f"{kept}: cannot be written: No space left on device; make room and run again")
    assert hub.url not in str(told.value), "the network is not blamed"
    assert not (tmp_path / "model").exists()
    hub.requests.clear()
    assert (fetch(hub, listing, tmp_path / "model") / "model.safetensors").read_bytes() == LARGE
    asked = {path.rpartition("/")[2]: piece for method, path, piece in hub.requests if method == "GET"}
    assert f"bytes={1 << 20}-" in asked.values(), "it goes on where the disk was full"


def test_two_at_once_do_not_write_one_directory(hub, tmp_path):
    kept = tmp_path / ".model.fetch"
    kept.mkdir()
    with fetching._locked(kept), pytest.raises(UserError, match="another command is fetching into it"):
        fetch(hub, list_files(hub), tmp_path / "model")


def test_what_the_hub_does_not_have_is_a_mistake(hub):
    with pytest.raises(UserError, match=r"org/other: http.* no such model"):
        list_files(hub, "org/other")
    with pytest.raises(UserError, match=r"no such revision .value v2."):
        list_files(hub, "org/model", "v2")
    with pytest.raises(UserError, match=r"--include \*\.onnx: org/model has no such file; it has config.json"):
        list_files(hub, "org/model", include=["*.onnx"])


def test_a_gated_model_says_how_to_get_it(hub, tmp_path):
    hub.gated = True
    with pytest.raises(UserError, match=r"license on the model's page.* set (HF_TOKEN|MODELSCOPE_API_TOKEN)"):
        fetch(hub, list_files(hub), tmp_path / "model")


@pytest.mark.parametrize("spoken", HUBS)
def test_no_network_is_a_failure_of_one_line(spoken, tmp_path):
    process = command(spoken, "http://127.0.0.1:9", "org/model", "--output", tmp_path / "model")
    _, err = process.communicate(timeout=100)
    assert (process.returncode, "Traceback" in err, err.count("\n")) == (1, False, 1)
    assert "http://127.0.0.1:9: " in err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["../out.json", "/etc/x.json", "a/../../x.json", "a\\b.json", "x\n.json"])
def test_names_that_lead_elsewhere_are_refused(name, hub):
    hub.listed = [{"rfilename": name, "size": 2, "blobId": "0" * 40}]
    with pytest.raises(UserError, match="invalid file name in the hub's listing"):
        list_files(hub)


def of(*names):
    return [RemoteFile(name, 1) for name in names]


@pytest.mark.parametrize(
    ("files", "include", "wanted"),
    [
        (
            ("config.json", "model.safetensors", "original/consolidated.safetensors", "a.py"),
            (),
            ("config.json", "model.safetensors"),
        ),
        (("model-1.safetensors", "consolidated.safetensors"), (), ("model-1.safetensors",)),
        (("consolidated.safetensors",), (), ("consolidated.safetensors",)),
        (("config.json", "pytorch_model.bin", "model.safetensors"), ("*.bin",), ("config.json", "pytorch_model.bin")),
        (
            ("config.json", "a.py", "model.safetensors"),
            ("*.safetensors", "*.py"),
            ("config.json", "a.py", "model.safetensors"),
        ),
        (("README.md", "only.gguf"), (), ("README.md", "only.gguf")),
    ],
)
def test_which_files_are_chosen(files, include, wanted):
    assert tuple(file.name for file in choose_files("org/model", of(*files), include)) == wanted


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("a.Q4.gguf", "a.Q8.gguf"), "has several GGUF files (a.Q4.gguf, a.Q8.gguf); choose one: --include NAME"),
        (("config.json", "pytorch_model.bin"), "has no safetensors files; it has config.json, pytorch_model.bin"),
    ],
)
def test_weights_that_must_be_named(files, said):
    with pytest.raises(UserError) as refused:
        choose_files("org/model", of(*files))
    assert said in str(refused.value)


def test_names_of_shipped_models_are_theirs():
    assert {*PUBLISHED} <= {model.name for model in shipped_models()}
    assert {*PUBLISHED_ON_MODELSCOPE.items()} < {*PUBLISHED.items()}
    for hub in HUBS.values():
        assert hub.repository("qwen3_8b") == "Qwen/Qwen3-8B"
        assert hub.repository("org/model") == "org/model"
        for name in ("qwen9", "a/b/c", "/b", "../b"):
            with pytest.raises(UserError, match=f"unknown on {hub.title}; give ORGANISATION/MODEL or a shipped model"):
                hub.repository(name)
    with pytest.raises(UserError, match="unknown on ModelScope; give ORGANISATION/MODEL"):
        HUBS["modelscope"].repository("llama3_8b")
