"""What compiling processes are told about memory, beside what a user has said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mindllm.jobs.environment import GLIBC_TUNABLES, KEEP_FREED, LARGE_PAGES, allocation_variables

OURS = f"{KEEP_FREED}:{LARGE_PAGES}"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", OURS),
        ("glibc.cpu.x86_ibt=off", f"glibc.cpu.x86_ibt=off:{OURS}"),
        ("glibc.malloc.tcache_count=9", f"glibc.malloc.tcache_count=9:{LARGE_PAGES}"),
        ("glibc.malloc.hugetlb=0", f"glibc.malloc.hugetlb=0:{KEEP_FREED}"),
        (OURS, None),
    ],
)
def test_what_a_user_says_stands(monkeypatch, said, expected):
    monkeypatch.setenv(GLIBC_TUNABLES, said)
    assert allocation_variables() == ({GLIBC_TUNABLES: expected} if expected else {})


def test_a_process_starts_with_them_and_says_nothing():
    done = subprocess.run(
        [sys.executable, "-c", "print(1)"], env={GLIBC_TUNABLES: OURS}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
