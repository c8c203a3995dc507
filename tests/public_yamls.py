"""The YAMLs that MindFormers publishes, for slow tests: those of its wheels, and of a checkout of its repository.

Wheels come from the package index by pip, once; their YAMLs are kept in the user's cache. The YAMLs below ``research/`` are in
no wheel: ``MINDLLM_PUBLIC_YAMLS`` names a directory with a checkout (or several).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mindllm.cache import user_cache
from toolkit.benchmark.mindformers_yamls import Result, convert_all

RELEASES = ("1.3.0", "1.3.2", "1.6.0", "1.7.0", "1.8.0", "1.9.0", "2.0.0", "2.1.0")
CHECKOUTS = "MINDLLM_PUBLIC_YAMLS"
SECONDS_OF_A_DOWNLOAD = 300


def training_yamls() -> Iterator[tuple[str, Path]]:
    """Yields name and path of every different YAML that trains, by the digest of its text.

    Skips the test that asks where neither a wheel can be had nor a checkout is named.
    """
    yield from ((name, Path(result.file)) for name, result in _different())


def converting_yamls() -> Iterator[tuple[str, Path]]:
    """Yields name and path of those of ``training_yamls`` that ``load_config`` reads and that pass all checks."""
    yield from ((name, Path(result.file)) for name, result in _different() if not result.reason)


def yamls_of_release(number: str, kept: Path) -> Path:
    """Returns the directory with the YAMLs of one release, which are put into ``kept``; skips the test without the index."""
    if refusal := _download(number, kept / number):
        pytest.skip(f"no YAMLs of MindFormers: {refusal}")
    return kept / number


@cache
def _different() -> tuple[tuple[str, Result], ...]:
    """The first file of every digest, under the name of its place: ``2.1.0/configs/qwen3/…``."""
    found: dict[str, tuple[str, Result]] = {}
    for name, directory in _directories():
        for result in convert_all([directory]):
            if result.digest:
                found.setdefault(result.digest, (f"{name}/{Path(result.file).relative_to(directory)}", result))
    return tuple(found.values())


def _directories() -> list[tuple[str, Path]]:
    """A name and a directory of each source."""
    named = os.environ.get(CHECKOUTS)
    if named and not Path(named).is_dir():
        pytest.fail(f"{CHECKOUTS} names no directory: {named}")
    checkouts = [("checkout", Path(named))] if named else []
    wheels, refusal = [], ""
    for release in RELEASES:
        if refusal := _download(release, kept := user_cache("mindformers") / release):
            break  # an index that does not answer is asked once
        wheels.append((release, kept))
    if not wheels and not checkouts:
        pytest.skip(f"no YAMLs of MindFormers: {refusal}; {CHECKOUTS} can name a checkout")
    return wheels + checkouts


def _download(release: str, kept: Path) -> str:
    """Puts the YAMLs of a release into the directory ``kept``, unless they are there; returns why not, or nothing."""
    if kept.is_dir():
        return ""
    with tempfile.TemporaryDirectory(dir=kept.parent) as name:
        options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", name]
        command = [sys.executable, "-m", "pip", "download", *options, f"mindformers=={release}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS_OF_A_DOWNLOAD, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return f"the package index took longer than {SECONDS_OF_A_DOWNLOAD} s for mindformers {release}"
        if done.returncode != 0:
            return f"pip cannot download mindformers {release}: {done.stderr.strip().splitlines()[-1:]}"
        yamls = Path(name, "yamls")
        with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as wheel:
            wheel.extractall(yamls, [member for member in wheel.namelist() if member.endswith(".yaml")])
        if not kept.is_dir():  # else another process was quicker
            yamls.replace(kept)
    return ""
