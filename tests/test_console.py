"""Text of users is text: never markup, never a command to the terminal, however it is printed."""

import ast
import io
import json
import logging
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mindllm.command import CommandParser, run_command
from mindllm.errors import UserError
from mindllm.logs import VisibleFormatter
from mindllm.terminal import console as terminal
from mindllm.terminal import progress as terminal_progress
from mindllm.terminal.console import PlainConsole, print_json, progress, track
from mindllm.terminal.progress import counted
from mindllm.terminal.render import passing
from mindllm.terminal.tables import Table, pairs, texts
from mindllm.terminal.text import styled, visible

ROOT = Path(__file__).parents[1]
HOSTILE = "runs[lr=3e-4][/x] run.yaml:100: \x1b[31mred\x9b\x07 \ud800 \u202eabc"
SHOWN = "runs[lr=3e-4][/x] run.yaml:100: \\x1b[31mred\\x9b\\x07 \\ud800 \\u202eabc"
SOURCES = sorted(path for room in ("mindllm", "toolkit") for path in (ROOT / room).rglob("*.py"))
MADE_IN = {
    "Console": "console.py",
    "Progress": "console.py",
    "Table": "tables.py",
}  # the class of rich, and the file that makes it
OTHER_WAYS = {"from_markup", "print_markup", "render_markup", "escape"}
PROTOCOLS = {"probe_program.py", "side.py"}  # lines between processes, read by ours


def printed(thing, width=None) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=width).print(thing)
    return file.getvalue()


@pytest.mark.parametrize(
    "thing",
    [
        HOSTILE,
        styled("a ", (HOSTILE, "bold red")),
        Table(HOSTILE, texts("name")),
        Table("", texts("name", HOSTILE), [("a", "b")]),
        Table("", texts("name", "value"), [("a", HOSTILE)]),
        pairs([(HOSTILE, "1")]),
        pairs([("name", HOSTILE)]),
    ],
)
def test_markup_and_control_characters_are_shown(thing):
    found = printed(thing)
    assert SHOWN in found
    assert "\x1b" not in found


def test_a_bar_and_a_status_show_them_too():
    for kind in ("xterm", "dumb"):
        file = io.StringIO()
        console = PlainConsole(file=file, force_terminal=True, width=200, _environ={"TERM": kind})
        with progress(console=console, transient=False) as bar:
            bar.add_task(HOSTILE, total=1)
        assert SHOWN in file.getvalue()
        assert "[31mred" not in file.getvalue().replace(SHOWN, "")
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, width=200, _environ={"TERM": "xterm"})
    with console.status(HOSTILE) as status:
        status.update(HOSTILE)
    assert SHOWN in file.getvalue()
    assert list(track([1, 2], HOSTILE, shown=False)) == [1, 2]


def test_letters_of_other_scripts_stay_as_they_are():
    assert visible("Größe 模型 عربي 👍🏽\tx\n") == "Größe 模型 عربي 👍🏽\tx\n"


def test_an_error_shows_what_the_user_wrote(capsys):
    def main(arguments):
        raise UserError(HOSTILE)

    with pytest.raises(SystemExit) as left:
        run_command(main, [])
    assert left.value.code == UserError.exit_code
    assert capsys.readouterr().err == f"error: {SHOWN}\n"


def test_an_unknown_option_is_shown(capsys):
    with pytest.raises(SystemExit):
        CommandParser(prog="tool").parse_args([HOSTILE])
    assert SHOWN in capsys.readouterr().err


def test_the_log_shows_them():
    record = logging.LogRecord("mindllm", logging.INFO, "a.py", 1, "%s", (HOSTILE,), None)
    assert VisibleFormatter("%(message)s").format(record) == SHOWN


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_json_is_ascii(capsys):
    print_json({"name": HOSTILE})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text)["name"] == HOSTILE


def test_json_tells_the_version_of_its_keys(capsys):
    print_json({"a": 1})
    print_json({"schema": 3, "a": 1})
    print_json([{"a": 1}])
    assert capsys.readouterr().out == '{"schema": 1, "a": 1}\n{"schema": 3, "a": 1}\n[{"a": 1}]\n'


def test_json_names_numbers_that_it_does_not_know(capsys):
    print_json({"losses": [1.5, math.nan, np.float32("inf")], "norms": {"largest": (-math.inf,)}})
    found = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert found == {"schema": 1, "losses": [1.5, "NaN", "Infinity"], "norms": {"largest": ["-Infinity"]}}
    assert [math.isnan(float(found["losses"][1])), float(found["norms"]["largest"][0])] == [True, -math.inf]


def test_a_terminal_without_unicode_gets_escapes_not_a_traceback(tmp_path):
    script = "from mindllm.command import run_command\nrun_command(lambda _: print('\\u2248 \\ud800'))"
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2248 \\ud800\n", "")


def test_nothing_is_printed_another_way():
    for path in SOURCES:
        refuse_other_ways(path)


def refuse_other_ways(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_rich = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich")
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if isinstance(node.func, ast.Name) and name in of_rich:
            assert name != "track", f"{path}:{node.lineno}: take track of mindllm.terminal.console"
            assert MADE_IN.get(name, path.name) == path.name, (
                f"{path}:{node.lineno}: take mindllm.terminal.console or mindllm.terminal.tables"
            )
            markup = any(item.arg == "markup" and not getattr(item.value, "value", True) for item in node.keywords)
            assert name != "TextColumn" or markup, (
                f"{path}:{node.lineno}: a TextColumn reads markup; write markup=False"
            )
        if name in OTHER_WAYS & of_rich or name == "from_markup":
            pytest.fail(f"{path}:{node.lineno}: markup; write styled()")
        if isinstance(node.func, ast.Name) and name == "print":
            assert path.name in PROTOCOLS, f"{path}:{node.lineno}: print; write output.print()"


def waited(file: io.StringIO, text: str) -> list[str]:
    """The lines of ``file`` as soon as ``text`` is among them."""
    end = time.monotonic() + 20
    while text not in file.getvalue():
        assert time.monotonic() < end, file.getvalue()
        time.sleep(0.01)
    return file.getvalue().splitlines()


def test_a_bar_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.02)
    file = io.StringIO()
    with progress(console=PlainConsole(file=file)) as bar:
        task = bar.add_task("compiling [/x] \x1b", total=64)
        bar.add_task("hidden", visible=False)
        bar.advance(task, 12)
        lines = waited(file, "12/64")
        bar.advance(task, 1)
        lines = waited(file, "13/64")
        bar.advance(task, 51)
        lines = waited(file, "working")
    assert lines[0] == "compiling [/x] \\x1b 12/64, after 0:00:00"
    assert all(re.fullmatch(r"(compiling \S+ \S+ 1[23]/64|working), after 0:00:\d\d", line) for line in lines)


def test_a_status_is_a_line_now_and_then_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.02)
    file = io.StringIO()
    console = PlainConsole(file=file)
    with console.status("run[lr=1].yaml: compiling") as status:
        waited(file, "run[lr=1].yaml: compiling, after 0:00:00\n")
        status.update("run[lr=1].yaml: executing")
        waited(file, "executing")
    printed = file.getvalue()
    time.sleep(0.1)
    assert file.getvalue() == printed


def test_what_is_short_says_nothing_where_there_is_no_terminal():
    file = io.StringIO()
    console = PlainConsole(file=file)
    assert terminal.SECONDS_BETWEEN_LINES == 30
    with progress(console=console) as bar, console.status("doing"):
        bar.advance(bar.add_task("reading", total=3), 3)
    assert file.getvalue() == ""


def test_what_stays_on_a_terminal_is_a_last_line():
    file = io.StringIO()
    with progress(console=PlainConsole(file=file), transient=False) as bar:
        bar.add_task("hidden", visible=False)
        bar.advance(bar.add_task("simulating", total=3), 3)
    assert file.getvalue() == "simulating 3/3, after 0:00:00\n"


def test_a_bar_on_a_terminal_prints_no_lines(monkeypatch):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.02)
    with progress(console=PlainConsole(file=io.StringIO(), force_terminal=True)) as bar:
        bar.add_task("reading", total=3)
        time.sleep(0.1)
        assert "after" not in bar.console.file.getvalue()


def test_who_logs_has_the_terminal_back_when_all_is_counted(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.02)
    shown = ""
    with passing() as told:
        told("checking rows", 0, 0)
        for what in ("checking rows", "evaluating"):  # a second bar follows the first
            told(what, 1, 4)
            while f"{what} 1/4, after 0:00:00" not in shown:
                shown += capsys.readouterr().err
            told(what, 4, 4)
        capsys.readouterr()
        time.sleep(0.1)
        assert capsys.readouterr().err == ""
        told("run[lr=1].yaml \x1b")
    assert capsys.readouterr().err == "run[lr=1].yaml \\x1b\n"


def test_what_is_counted_is_told_now_and_then(monkeypatch):
    told = []
    clock = iter([0.0, 0.05, 0.1, 0.15])
    monkeypatch.setattr(terminal_progress.time, "monotonic", lambda: next(clock))
    items = [*counted("abcd", "reading", lambda *of: told.append(of))]
    assert items == ["a", "b", "c", "d"]
    assert told == [("reading", 0, 4), ("reading", 2, 4), ("reading", 4, 4)]
