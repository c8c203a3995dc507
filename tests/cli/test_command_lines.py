"""Every tool's command line: its help needs no heavy library, and what is wrong ends with 2 and one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from mindllm.cli.registry import VERBS

ROOT = Path(__file__).parents[2]
TOOLS = [f"toolkit.{path.stem}" for path in (ROOT / "toolkit").glob("[!_]*.py")]
HEAVY = ("mindspore", "scipy", "matplotlib", "lm_eval", "datasets", "torch")
VERB_MODULES = sorted({verb.module for verb in VERBS.values() if not verb.run_mode})
OTHERS = [
    "mindllm.cli.run",
    "mindllm.launch.__main__",
    "toolkit.config_reference.__main__",
]
CONFIG = ("--config", "configs/llama2/pretrain_llama2_tiny.yaml")


def test_help_is_there_at_once():
    program = f"""
import contextlib, importlib, io, sys
for tool in {[*VERB_MODULES, *TOOLS, *OTHERS]}:
    module = importlib.import_module(tool)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        module.main(["--help"])
    assert printed.getvalue().startswith("usage:"), tool
    assert not (heavy := {{*{HEAVY}}} & {{*sys.modules}}), (tool, heavy)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        ("search", (), "--config"),
        ("search", (*CONFIG, "--seconds", "nan"), "--seconds: nan is not a number of seconds above 0"),
        ("search", (*CONFIG, "--no_such_key=3"), "no_such_key: unknown key"),
        ("preflight", (*CONFIG, "--port", "99999"), "--port: 99999 is not a port"),
        ("preflight", (*CONFIG, "--port", "65535"), "--port 65535: the port after it"),
        ("preflight", ("--workers", "0"), "--workers: 0 is not a number from 1 on"),
        ("view", (*CONFIG, "--samples", "0"), "--samples: 0 is not a number from 1 on"),
        ("data", ("--workers", "many"), "--workers: many is not a number from 1 on"),
        ("evaluate", ("--model", "a", "--tasks", "b", "--limit", "²"), "--limit: ² is not a number from 1 on"),
        ("weights", ("quantize", "a", "b", "--group", "0"), "--group: 0 is not a number from 1 on"),
        ("weights", ("nonsense",), "invalid choice: 'nonsense'"),
        ("inspect", ("summary",), "nothing is given; name a graph"),
        ("inspect", ("summary", *CONFIG, "--no_such_key", "3"), "no_such_key: unknown key"),
    ],
)
def test_what_is_wrong_ends_with_2_and_one_line(verb, arguments, said, capsys):
    from mindllm.command import run_command

    with pytest.raises(SystemExit) as left:
        run_command(VERBS[verb].run, arguments)
    printed = capsys.readouterr()
    assert (left.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert printed.err.startswith("error: ")
    assert said in printed.err
