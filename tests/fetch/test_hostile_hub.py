"""A hub that lies: what it lists and sends stays within bounds, inside of the directory, and ends in no traceback."""

import copy
import random
import tracemalloc
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from mindllm.errors import RunFailed, UserError
from mindllm.fetch import hub as requests
from mindllm.fetch.directory import fetch
from mindllm.fetch.huggingface import HuggingFace
from mindllm.fetch.listing import MAX_FILE_SIZE
from mindllm.fetch.modelscope import ModelScope

pytest.importorskip("huggingface_hub")

from local_hub import local_hub

HUBS = {"huggingface": HuggingFace(), "modelscope": ModelScope()}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 2000,
    "model.safetensors": bytes(range(256)) * 40,
}
FIELDS = {
    "huggingface": ("rfilename", "size", "blobId", "lfs"),
    "modelscope": ("Path", "Size", "Sha256", "Type"),
}
ODD = [
    *(None, True, -1, 0, 22, 2.5, 1e308, 10**30, 10**400, "", "a", [], [[]], {}, {"size": 1}, ["x"]),
    *(
        "../keep",
        "/../../../keep",
        "/etc/keep",
        "a/../../keep",
        "..",
        ".",
        ".lock",
        "a//b",
        "a\\b",
        "\ud800",
        "\x1b[2J",
    ),
    *("x" * 5000, "a/" * 300 + "b", "config.json", "config.json/x", "z.incomplete", "ü" * 100, "0" * 40, "0" * 64),
]


@pytest.fixture(params=HUBS)
def hub(request, monkeypatch):
    """A local hub, asked with the protocol of ``hub.protocol``."""
    from huggingface_hub import constants

    with local_hub() as hub:
        hub.files, hub.protocol = dict(FILES), request.param
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
        monkeypatch.setattr(requests.time, "sleep", lambda seconds: None)
        yield hub


def fetch_model(hub, directory):
    client = HUBS[hub.protocol]
    return fetch(client, client.list_files("org/model"), directory)


def edit_entry(hub, name, **fields):
    """Let the hub list other fields of the file ``name``."""

    def edit(answer):
        data = answer.get("Data") or answer
        for entry in data.get("siblings") or data.get("Files") or []:
            if name in (entry.get("rfilename"), entry.get("Path")):
                entry.update(fields)
        return answer

    hub.edit = edit


def bytes_below(directory):
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_without_an_end_is_cut_at_its_listed_size(name, hub, tmp_path):
    hub.endless = [name]
    with pytest.raises(RunFailed, match=rf"sends more than the {len(FILES[name]):,} bytes of {name} that it lists"):
        fetch_model(hub, tmp_path / "model")
    assert bytes_below(tmp_path) <= sum(map(len, FILES.values()))
    assert hub.sent < 50 << 20, "the connection is closed"


def test_a_listing_without_an_end_is_cut(hub):
    hub.endless = ["listing"]
    tracemalloc.start()
    try:
        with pytest.raises(RunFailed, match="over 16 MiB of JSON"):
            HUBS[hub.protocol].list_files("org/model")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * requests.MAX_JSON
    assert hub.sent < 100 << 20


def test_a_compressed_answer_is_refused(hub):
    """A few bytes could become gigabytes."""
    hub.encoding = "gzip"
    with pytest.raises(RunFailed, match=r"compresses its answer.*gzip"):
        HUBS[hub.protocol].list_files("org/model")


@pytest.mark.parametrize("digest", ["/../../../keep", "../../keep", "0" * 39, "g" * 64, 7, ["a"], {"a": 1}])
def test_a_digest_is_no_path(digest, hub, tmp_path):
    keep = tmp_path / "keep"
    keep.write_bytes(b"mine")
    fields = {"Sha256": digest, "blobId": digest}
    edit_entry(hub, "config.json", **fields)
    with pytest.raises(RunFailed, match=r"gives no valid (SHA-256|git checksum) of config\.json"):
        fetch_model(hub, tmp_path / "a" / "b" / "c" / "model")
    assert keep.read_bytes() == b"mine"
    assert not (tmp_path / "a").exists(), "nothing is written"


def test_a_large_files_digest_is_no_path(hub):
    edit_entry(hub, "model.safetensors", lfs={"size": 3, "sha256": "/../../../keep"}, Sha256="/../../../keep")
    with pytest.raises(RunFailed, match=r"gives no valid SHA-256 of model\.safetensors"):
        HUBS[hub.protocol].list_files("org/model")


@pytest.mark.parametrize("size", [None, -1, 2.5, True, "22", 10**400, 1 << 60])
def test_a_size_that_is_none_is_refused(size, hub):
    edit_entry(hub, "config.json", size=size, Size=size)
    with pytest.raises(RunFailed, match=r"gives no valid size of config\.json"):
        HUBS[hub.protocol].list_files("org/model")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("config.json", "lists a name twice"),
        ("config.json/x.json", "both as a file and as a directory"),
        (".lock", "invalid file name"),
        ("x.incomplete", "invalid file name"),
        ("x" * 300 + ".json", "invalid file name"),
    ],
)
def test_names_that_one_directory_cannot_hold_are_refused(other, reason, hub):
    edit_entry(hub, "tokenizer.json", rfilename=other, Path=other)
    with pytest.raises(UserError, match=reason):
        HUBS[hub.protocol].list_files("org/model")


@pytest.mark.parametrize("commit", ["../../x", "main", None, 7, "A" * 40, "a" * 41])
def test_a_commit_that_is_none_is_refused(commit, hub):
    if hub.protocol == "modelscope":
        pytest.skip("names no commit")
    hub.edit = lambda answer: answer | {"sha": commit}
    with pytest.raises(RunFailed, match="gives no valid commit"):
        HUBS[hub.protocol].list_files("org/model")


def test_a_license_is_one_printable_line(hub):
    hub.card["license"] = "mit\x1b[2J\n" + "x" * 10_000
    license_name = HUBS[hub.protocol].list_files("org/model").license
    assert license_name.startswith("'mit")
    assert license_name.isprintable()
    assert len(license_name) < 200


def test_a_link_in_place_of_the_unfinished_directory_is_refused(hub, tmp_path):
    """Whoever may write next to the target must not choose the directory that is cleaned."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    (tmp_path / ".model.fetch").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is a link"):
        fetch_model(hub, tmp_path / "model")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_directory_of_another_commit_gives_way_to_a_file(hub, tmp_path):
    kept = tmp_path / ".model.fetch" / "config.json"
    kept.mkdir(parents=True)
    (kept / "x").write_text("old")
    assert (fetch_model(hub, tmp_path / "model") / "config.json").read_bytes() == FILES["config.json"]


def mutate(value, draw, fields):
    """Return a copy of an answer in JSON with one to three values replaced, removed or repeated."""
    tree = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places = list(walk(tree))
        if not places:
            break
        parents = [place for place in places if place[1] in fields] if draw.random() < 0.6 else places
        parent, key = draw.choice(parents or places)
        action = draw.choice(("replace", "replace", "remove", "repeat"))
        if action == "replace":
            parent[key] = copy.deepcopy(draw.choice(ODD))
        elif action == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        else:
            del parent[key]
    return tree


def walk(tree):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from walk(value)


def test_odd_listings_end_in_a_line_or_a_list(hub, monkeypatch):
    """Seeded: the readers alone, with thousands of listings."""
    client, outcomes, messages = HUBS[hub.protocol], Counter(), []
    answers = {"huggingface": hub.listing(), "modelscope": {"Code": 200, "Data": hub.modelscope_files()}}
    for seed in range(3000):
        answer = mutate(answers[hub.protocol], random.Random(seed), FIELDS[hub.protocol])
        monkeypatch.setattr(client, "get_json", lambda *request, answer=answer: answer)
        try:
            listing = client.read_listing(None, "org/model", "main")
            outcomes["listed"] += 1
        except (UserError, RunFailed) as error:
            outcomes[type(error)] += 1
            messages.append(str(error))
            continue
        for file in listing.files:
            assert Path("/top", file.name).resolve().is_relative_to("/top")
            assert 0 <= file.size <= MAX_FILE_SIZE
            assert not set(file.digest) - set("0123456789abcdef")
    assert all(message.isprintable() and len(message) < 1000 for message in messages)
    assert min(outcomes[kind] for kind in ("listed", UserError, RunFailed)) > 100


def test_what_odd_listings_write_stays_in_the_directory(hub, tmp_path):
    for seed in range(30):
        draw = random.Random(seed)
        if seed % 5 == 0:
            text = draw.choice([b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000, b"1" * 10_000])
            hub.edit = lambda answer, text=text: text
        else:
            hub.edit = lambda answer, draw=draw: mutate(answer, draw, FIELDS[hub.protocol])
        top = tmp_path / f"{seed}"
        (top / "below" / "it").mkdir(parents=True)
        (top / "keep").write_bytes(b"mine")
        with suppress(UserError, RunFailed):
            fetch_model(hub, top / "below" / "it" / "model")
        assert bytes_below(top) <= sum(map(len, FILES.values())) + len(b"mine")
        paths = {path.relative_to(top).as_posix() for path in top.rglob("*")}
        within = {path for path in paths if path.startswith(("below/it/model", "below/it/.model.fetch"))}
        assert paths - within == {"keep", "below", "below/it"}
        assert (top / "keep").read_bytes() == b"mine"
