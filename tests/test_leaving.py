"""How a command ends: what is Python's is finished, and native libraries cannot change the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindllm.launch.meeting import DESCRIPTOR
from mindllm.process import exit_hooks as leaving
from mindllm.run import start

PROGRAM = """
import atexit, ctypes, sys, threading, time
from mindllm.command import run_command
from mindllm.process.exit_hooks import skip_exit_functions, when_leaving
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # as a destructor of a library, whose threads still work, may do
def late():
    time.sleep(0.3)
    print("a thread")
def main(arguments):
    atexit.register(print, "an exit function")
    when_leaving(print, "first registered")
    when_leaving(print, "then")
    {}
sys.kept = open("kept.txt", "w")
sys.kept.write("never closed")
run_command(main)
"""
ROOT = Path(__file__).resolve().parents[1]
RANK = "skip_exit_functions(); atexit.register(libc.abort); "


def run(main, directory):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(main)], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=directory,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (directory / "kept.txt").read_text() == "never closed"
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_all_that_is_pythons_is_finished(tmp_path):
    code, printed, errors = run("threading.Thread(target=late).start(); libc.puts(b'of C'); return 3", tmp_path)
    assert (code, errors) == (3, "")
    assert "of C" in printed
    assert [line for line in printed if line != "of C"] == ["a thread", "an exit function", "then", "first registered"]


def test_a_rank_tidies_up_and_skips_exit_functions(tmp_path):
    assert run(RANK + "return 3", tmp_path) == (3, ["then", "first registered"], "")


@pytest.mark.parametrize("rank", [RANK, ""])
def test_an_error_of_ours_is_a_traceback_and_leaves_the_same_way(rank, tmp_path):
    code, printed, errors = run(rank + "raise ValueError('ours')", tmp_path)
    assert (code, printed[-2:]) == (1, ["then", "first registered"])
    assert "Traceback" in errors
    assert "ValueError: ours" in errors


@pytest.mark.parametrize(("ending", "code", "said"), [("2", 2, ""), ("", 0, ""), ("'why'", 1, "why\n")])
def test_the_code_of_a_parser_is_kept(ending, code, said, tmp_path):
    ended, _, errors = run(f"sys.exit({ending})", tmp_path)
    assert (ended, errors) == (code, said)


def test_an_exit_function_that_fails_does_not_change_the_code(tmp_path):
    code, printed, errors = run("atexit.register(lambda: 1 / 0); return 3", tmp_path)
    assert (code, printed[-1]) == (3, "first registered")
    assert "ZeroDivisionError" in errors


def test_what_a_launcher_has_started_is_a_rank_from_the_beginning(monkeypatch):
    class Reached(Exception):
        pass

    def reached(config):
        raise Reached

    monkeypatch.setattr(leaving, "_own_alone", False)
    monkeypatch.setattr(start, "execution_of", reached)
    for seat, is_rank in ((None, False), ("0", True)):
        if seat:
            monkeypatch.setenv(DESCRIPTOR, seat)
        with pytest.raises(Reached):
            start.start(None)
        assert leaving._own_alone is is_rank


@pytest.mark.parametrize("output", ["| true", "> /dev/full", ">&-"])
def test_output_that_nobody_takes(output):
    program = "from mindllm.command import run_command\nfrom mindllm.terminal.console import output\n"
    program += "run_command(lambda _: output.print('x' * 100000))"
    command = f'set -o pipefail; "$0" -c "$1" {output}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, program], env=environment, capture_output=True, text=True, check=False
    )
    expected = {
        "| true": (141, ""),
        "> /dev/full": (1, "error: No space left on device; free disk space or write elsewhere\n"),
        ">&-": (0, ""),
    }
    assert (done.returncode, done.stderr) == expected[output]
