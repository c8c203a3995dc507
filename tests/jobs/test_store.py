"""Stored results: whole or absent, found again, within bounds."""

from __future__ import annotations

import os
from contextlib import suppress

from mindllm.errors import UserError
from mindllm.jobs.store import ABANDONED_SECONDS, Store


def read(path):
    if path.read_text() == "damaged":
        raise UserError("damaged")
    return path.read_text()


def write(value, path):
    path.write_text(value)


def names(store):
    return sorted(path.name for path in store.directory.iterdir())


def test_a_value_is_made_once_and_again_when_it_is_damaged(tmp_path):
    made = []

    def make():
        made.append("value")
        return "value"

    store = Store(tmp_path)
    assert [store.get("key", make, read, write) for _ in range(2)] == ["value"] * 2
    assert len(made) == 1
    store.path("key").write_text("damaged")
    assert store.get("key", make, read, write) == "value"
    assert len(made) == 2


def test_what_fails_is_not_stored(tmp_path):
    store = Store(tmp_path)
    with suppress(ValueError), store.writing("key") as path:
        path.write_text("half")
        raise ValueError("no value")
    with suppress(ValueError), store.open_directory("other") as path:
        (path / "half").touch()
        raise ValueError("no value")
    assert names(store) == []


def fill(store, *keys, size=10):
    """Store entries, each used longer ago than the one before."""
    for age, key in enumerate(keys):
        with store.writing(key) as path:
            path.write_bytes(b"0" * size)
        os.utime(store.path(key), (1e9 - age, 1e9 - age))


def test_entries_that_were_not_used_for_longest_are_removed(tmp_path):
    fill(Store(tmp_path, "a-"), "new", "middle", "old")
    fill(Store(tmp_path, "b-"), "other")
    store = Store(tmp_path, "a-", max_entries=2)
    store.trim()
    assert names(store) == ["a-middle", "a-new", "b-other"]
    store.trim(used=store.path("middle"))
    assert names(store) == ["a-middle", "a-new", "b-other"]


def test_directories_are_bounded_by_their_bytes(tmp_path):
    for age, key in enumerate(("new", "middle", "old")):
        with Store(tmp_path).open_directory(key) as path:
            (path / "file").write_bytes(b"0123456789")
        os.utime(Store(tmp_path).path(key), (1e9 - age, 1e9 - age))
    store = Store(tmp_path, max_bytes=25)
    store.trim(used=store.path("old"))
    assert names(store) == ["new", "old"]
    Store(tmp_path, max_bytes=1).trim(used=store.path("old"))
    assert names(store) == ["old"], "what is in use stays"


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path):
    store = Store(tmp_path, "a-")
    for name, age in ((".a-old.1", ABANDONED_SECONDS + 60), (".a-new.2", 0), (".b-old.1", ABANDONED_SECONDS + 60)):
        (tmp_path / name).mkdir()
        moment = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (moment, moment))
    store.trim()
    assert names(store) == [".a-new.2", ".b-old.1"]


def test_a_namespace_lies_in_the_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fill(Store("name/space"), "key")
    assert (tmp_path / "mindllm" / "name" / "space" / "key").is_file()
