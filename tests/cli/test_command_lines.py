"""Every tool's command line: its help needs no heavy library, and what is wrong ends with 2 and one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from mindllm.cli.registry import VERBS

ROOT = Path(__file__).parents[2]
TOOLS = [f"toolkit.{path.stem}" for path in (ROOT / "toolkit").glob("[!_]*.py")]
HEAVY = ("mindspore", "scipy", "matplotlib", "lm_eval", "datasets", "torch")
VERB_MODULES = sorted({verb.module for verb in VERBS.values() if not verb.file})
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
        ("search", (), "write the run first: mindllm search run.yaml"),
        ("search", (*CONFIG, "--seconds", "nan"), "--seconds: must be a number above 0 (value nan)"),
        ("search", (*CONFIG, "--no_such_key=3"), "no_such_key: unknown key"),
        ("preflight", (*CONFIG, "--port", "99999"), "--port: must be a port from 1 to 65535 (value 99999)"),
        ("preflight", (*CONFIG, "--port", "65535"), "--port 65535: the next port is also used"),
        ("preflight", ("--workers", "0"), "--workers: must be an integer of at least 1 (value 0)"),
        ("view", (*CONFIG, "--samples", "0"), "--samples: must be an integer of at least 1 (value 0)"),
        ("data", ("--workers", "many"), "--workers: must be an integer of at least 1 (value many)"),
        (
            "evaluate",
            ("--model", "a", "--tasks", "b", "--limit", "²"),
            "--limit: must be an integer of at least 1 (value ²)",
        ),
        ("weights", ("quantize", "a", "b", "--group", "0"), "--group: must be an integer of at least 1 (value 0)"),
        ("weights", ("nonsense",), "invalid choice: 'nonsense'"),
        ("inspect", ("summary",), "required: GRAPH|RUN"),
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


@pytest.mark.parametrize("verb", ["finetune", "pretrain", "generate", "chat", "evaluate", "train", "prove", "convert"])
@pytest.mark.parametrize("key", [("--callbacks=[{type: Nope, a: b}]",), ("--callbacks", "[{type: Nope, a: b}]")])
def test_a_value_with_spaces_belongs_to_its_key(verb, key, capsys):
    from mindllm.command import run_command
    from mindllm.main import main

    given = (CONFIG[1], "--to", "mindformers-2") if verb == "convert" else CONFIG
    with pytest.raises(SystemExit) as left:
        run_command(main, [verb, *given, *key])
    assert left.value.code == 2
    assert "callbacks.0.type: unknown type (value Nope)" in capsys.readouterr().err


def test_words_that_options_take_are_not_keys():
    from mindllm.cli.generate import make_parser
    from mindllm.cli.train import make_parser as make_learning_parser

    options, keys = make_parser("generate").parse_known_args(["M", "--prompt", "--x=1 y", "--seed", "3", "--k={a: b}"])
    assert (options.prompt, keys) == (["--x=1 y"], ["--seed=3", "--k={a: b}"])
    words = ["M", "D", "--offset", "-1", "--a=b c", "E", "--ignore-unknown-keys", "F", "--method", "lora"]
    options, keys = make_learning_parser("finetune").parse_known_args(words)
    assert (str(options.model), options.method, options.ignore_unknown_keys) == ("M", "lora", True)
    assert [*map(str, options.data), *keys] == ["D", "E", "--offset=-1", "--a=b c", "--ignore-unknown-keys", "F"]


def test_every_verb_with_keys_can_ignore_unknown_ones():
    from mindllm.cli.registry import VERBS

    without = []
    for name, verb in VERBS.items():
        parser = verb.parser()
        inner = next((action.choices for action in parser._actions if action.nargs == "A..."), None)
        parsers = list(dict(inner).values()) if inner else [parser]
        without += [name for one in parsers if one.takes_keys and "--ignore-unknown-keys" not in one.format_help()]
        without += [name for one in parsers if verb.takes_keys and not one.takes_keys and name != "models"]
    assert not without
