"""``mindllm <verb>``: the screen of verbs, what a mistake is answered with, prog as it was called, completion in a real shell."""

import argparse
import importlib
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import mindllm
from mindllm.cli import registry
from mindllm.cli.registry import TABLE, VERBS
from mindllm.command import output_directory, output_file, run_command
from mindllm.config import RunConfig
from mindllm.config.generation import EvaluationConfig
from mindllm.main import main
from mindllm.mindformers.reader import KEYS
from mindllm.shorthands import SHORTHANDS
from tests.mindformers.mindformers_files import LEGACY, writer

ROOT = Path(__file__).parents[2]
TINY = "configs/llama2/pretrain_llama2_tiny.yaml"
HEAVY = ("mindspore", "numpy", "pydantic", "yaml", "scipy", "matplotlib", "lm_eval", "mindllm.config.run")


def said(capsys, *arguments):
    """Exit code, standard output and standard error of ``mindllm ARGUMENTS``."""
    with pytest.raises(SystemExit) as left:
        run_command(main, arguments)
    printed = capsys.readouterr()
    return left.value.code, printed.out, printed.err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_fits_one_screen_and_lists_every_verb(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mindllm"])
    code, out, err = said(capsys, *arguments) if arguments else (main(), *capsys.readouterr())
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    listed = [name for line in lines[1:-1] for name in line[10:28].strip().split(", ")]
    assert listed == [verb.name for verb in TABLE]
    second = {after.name for verb, after in pairwise(TABLE) if verb.with_next}
    assert all((verb.with_next or verb.help) in out for verb in TABLE if verb.name not in second)


def test_groups_stand_together():
    groups = [verb.group for verb in TABLE]
    assert [group for group, before in zip(groups, [None, *groups], strict=False) if group != before] == [
        *dict.fromkeys(groups)
    ]


def test_versions_are_told_without_importing_mindspore():
    code = "import sys; from mindllm.main import main; main(['--version']); assert 'mindspore' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    ours, theirs = done.stdout.splitlines()
    assert ours == f"mindllm {mindllm.__version__}"
    assert re.fullmatch(r"MindSpore 2\.10\..+", theirs)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("serach",), "did you mean 'search'?"),
        (("dry_run",), "did you mean 'dry-run'?"),
        (("tune",), "use mindllm search RUN;"),
        (("pipeline-balance",), "use mindllm plan RUN;"),
        (("run_llm.py",), "use mindllm train RUN;"),
        (("xyzzy",), "xyzzy: unknown verb; mindllm --help lists all"),
        (("--verson",), "did you mean '--version'?"),
        (("infer", "models/base"), "infer: unknown verb; use mindllm chat MODEL, or mindllm generate MODEL"),
        (("export",), "export: unknown verb; use mindllm weights export CHECKPOINT DIRECTORY"),
        (("weights",), "valid: import, export, adapter, merge, unmerge, quantize, info;"),
        (("inspect", TINY), "write one of summary, show, comm,"),
        (("view", "chats.jsonl"), "chats.jsonl: is a data file; name the YAML of a run"),
        (("finetune", "--model", "base", "--data", "chats.jsonl"), "(arguments, not --model or --data)"),
        (("--config", "a.yaml"), "a verb must come first; example: mindllm train run.yaml"),
        (("search", "--config", "a.yaml", "--sedonds", "3"), "--sedonds: unknown option; did you mean --seconds?"),
        (("train", "--confg", "a.yaml"), "did you mean --config?"),
        (("train", "--resume_training"), "write the run first: mindllm train run.yaml"),
        (("time", "--explain"), "write the run first: mindllm time run.yaml"),
        (("train", "--config", TINY, "--batch_sise", "3"), "did you mean --batch-size?"),
        (("eval", "--config", TINY, "--train_type", "lora"), "use mindllm finetune --method"),
        (("eval", "--config", TINY, "--num_train_epochs", "3"), "write runner_config.epochs (--epochs)"),
        (("weights", "impot", "a", "b"), "did you mean 'import'?"),
        (("weights", "import", "a", "b", "--jsn"), "did you mean --json?; mindllm weights import --help"),
        (("calibrate", "--mesured", "a"), "did you mean --measured?; mindllm time calibrate --help"),
        (("time", "calibrate", "--mesured", "a"), "did you mean --measured?; mindllm time calibrate --help"),
        (("offline", "--device", "2", "--", "python", "--devics"), "mindllm offline --help"),
        (
            ("train", "--config", TINY, "--run_mode", "eval"),
            "--run_mode eval: contradicts mindllm train; remove it, or use mindllm evaluate",
        ),
        (("chat", "--config", TINY, "--run_mode=no"), "--run_mode no: contradicts mindllm chat; remove it\n"),
        (("fetch", "a/b", "--out", "x"), "--out: unknown option; similar: --output, "),
        (("fetch", "a/b", "--zzz"), "--zzz: unknown option; mindllm fetch --help"),
        (("fetch", "a", "b"), "b: unexpected argument; mindllm fetch --help"),
        (("fetch", "qwen3_8"), "give ORGANISATION/MODEL or a shipped model; did you mean 'qwen3_8b'?"),
        (("models", "qwn3_8b"), "qwn3_8b: unknown model or directory; similar: qwen3_8b, "),
        (("fetch", "a/b", "--output", str(ROOT / "setup.py")), "is a file, not a directory"),
        (("fetch", "a/b", "--output", "new.json"), "new.json: is the name of a file; this option takes a directory"),
        (("schema", "--output", "new/"), "new/: is a directory; this option takes a file"),
        (("convert", TINY, "--output", "."), ".: is a directory; give the name of a file"),
        (
            ("launch", "--workers", "1", "train", "--config", "a"),
            'quote the script with its options: "train --config ..."',
        ),
        (("launch", "--workers", "1", "train --run_mode eval"), "--run_mode: train says this itself; leave it out"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(arguments, wanted, capsys):
    code, out, err = said(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert wanted in err


@pytest.mark.parametrize("verb", [verb for verb in TABLE if verb.takes_keys], ids=lambda verb: verb.name)
def test_no_key_of_a_yaml_is_taken_for_a_misspelt_option(verb):
    names = {*SHORTHANDS, *RunConfig.model_fields, *(key.partition(".")[0] for key in KEYS)}
    parser = verb.parser()
    for name in names - {option.removeprefix("--") for option in parser._option_string_actions}:
        parser._refuse_misspelt(f"--{name}")


@pytest.mark.parametrize("mode", ["train", "finetune", "eval", "predict", "chat"])  # eval and predict are aliases
def test_a_run_verb_sets_the_mode_of_the_yaml(mode, capsys):
    given = (mode, "--config", str(ROOT / TINY), "--print_config", "--load_checkpoint=somewhere")
    code, out, err = said(capsys, *given, "--do_sample")
    assert (code, f"\nrun_mode: {mode}\n" in f"\n{out}") == (0, True), err
    assert said(capsys, *given, "--run_mode", mode)[0] == 0


@pytest.mark.parametrize("verb", TABLE, ids=lambda verb: verb.name)
def test_help_names_the_command(verb):
    own = verb.parser().format_help()
    assert own.startswith(f"usage: mindllm {verb.name} ")
    assert f"\n  mindllm {verb.name} " in own  # the examples
    assert "toolkit" not in own


def test_the_script_names_itself():
    done = subprocess.run(
        [sys.executable, "run_llm.py", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith("usage: run_llm.py ")
    assert "\n  python run_llm.py --config" in done.stdout
    assert "--run_mode chat" in done.stdout


@pytest.mark.parametrize(
    ("tool", "verb"), [("pipeline_balance", "plan"), ("dry_run", "dry-run"), ("ir_inspect", "inspect")]
)
def test_names_that_users_of_mindformers_know_run_the_verb(tool, verb):
    done = subprocess.run(
        [sys.executable, "-m", f"toolkit.{tool}", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith(f"usage: mindllm {verb} ")


def test_parsers_import_nothing_heavy():
    code = f"""
import sys
from mindllm.cli.registry import TABLE
for verb in TABLE:
    verb.parser().format_help()
    assert not (heavy := {{*{HEAVY}}} & {{*sys.modules}}), (verb.name, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_what_help_says_of_the_library_is_true():
    """These stand twice, because importing them takes longer than help may."""
    from mindllm.cli import check, data, evaluate, plan
    from mindllm.data.preprocess.sources import HANDLERS
    from mindllm.planning.problem import Schedule
    from mindllm.planning.reports.picture import FORMATS
    from mindllm.timing.measured import kernel_file
    from mindllm.verify.outcome import ACCUMULATION_STEPS, MOST_RANKS

    assert (check.MOST_RANKS, check.ACCUMULATION_STEPS) == (MOST_RANKS, ACCUMULATION_STEPS)
    assert tuple(HANDLERS) == data.HANDLERS
    assert EvaluationConfig.model_fields["data"].default == evaluate.DATA
    assert EvaluationConfig.model_fields["batch_size"].default == evaluate.BATCH_SIZE
    assert Schedule.__args__ == plan.SCHEDULES
    assert plan.FORMATS == FORMATS
    assert (
        kernel_file.FILE
        in VERBS["time"].parser().parse_known_args.__func__.__globals__["calibrate_parser"]().format_help()
    )


@pytest.mark.parametrize("verb", [verb for verb in TABLE if verb.takes_keys], ids=lambda verb: verb.name)
def test_shorthands_reach_the_configuration_of_every_verb(verb, capsys, tmp_path):
    subjects = {"convert": [str(writer(tmp_path)(LEGACY))], "profile": [str(ROOT / TINY), str(tmp_path)]}
    subject = subjects.get(verb.name, ["--config", str(ROOT / TINY)])
    subject += ["--devices", "8"] if verb.name == "configure" else []
    before = ["summary"] if verb.name == "inspect" else []
    size = "batch_size" if verb.name != "evaluate" else "train_steps"  # --batch-size of evaluate is an option
    for shorthand, wrong in ((size, "0"), ("device_target", "Abacus")):
        code, _, err = said(capsys, verb.name, *before, *subject, f"--{shorthand}", wrong)
        assert (code, SHORTHANDS[shorthand] in err, wrong in err) == (2, True, True), err


@pytest.mark.parametrize(
    "options",
    [["--device", "a100_80g"], ["--explain"], ["--parallel_config.data_parallel=2"], ["--batch_size", "4"]],
    ids=" ".join,
)
def test_a_configuration_may_stand_behind_options(options):
    parser = VERBS["time"].parser()
    assert parser.parse_known_args([*options, "run.yaml"]) == parser.parse_known_args(["run.yaml", *options])
    assert parser.parse_known_args([*options, "run.yaml"])[0].run == "run.yaml"
    assert parser.parse_known_args([*options, "--config", "run.yaml"]) == parser.parse_known_args(
        ["run.yaml", *options]
    )


@pytest.mark.parametrize("verb", [verb for verb in TABLE if verb.takes_keys], ids=lambda verb: verb.name)
def test_a_configuration_is_the_first_word_of_every_verb_that_has_one(verb, capsys, tmp_path):
    """As people type it. A word too many is told; a word behind options is none."""
    if not any(action.metavar == "RUN" for action in verb.parser()._actions) or verb.name == "profile":
        return  # it takes other arguments
    code, _, err = said(capsys, verb.name, str(ROOT / TINY), "--batch_size", "0")
    assert (code, SHORTHANDS["batch_size"] in err) == (2, True), err
    assert said(capsys, verb.name, str(tmp_path / "run.yaml"))[::2] == (
        2,
        f"error: {tmp_path / 'run.yaml'}: no such file\n",
    )


OF_TIME = ["calibrate", "--explain", "--measured"]


def test_completion_works_in_a_real_bash(tmp_path):
    script = subprocess.run(
        [sys.executable, "-m", "mindllm", "completion", "bash"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    (tmp_path / "mindllm.bash").write_text(script)
    (tmp_path / "run.yaml").touch()
    asked = r"""
source ./mindllm.bash
complete -p mindllm > /dev/null || exit 1
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_mindllm; echo "${COMPREPLY[*]}"; }
ask mindllm sea
ask mindllm search --sec
ask mindllm weights imp
ask mindllm weights quantize --method g
ask mindllm train ru
ask mindllm completion z
ask mindllm time cal
ask mindllm time --expl
ask mindllm time calibrate --mea
"""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["search", "--seconds", "import", "gptq", "run.yaml", "zsh", *OF_TIME]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_for_other_shells_names_every_verb(shell, capsys, tmp_path):
    code, out, _ = said(capsys, "completion", shell)
    assert code == 0
    assert all(word in out for word in (*(verb.name for verb in TABLE), "calibrate"))
    if shutil.which(shell):
        (tmp_path / "script").write_text(out)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_the_registry_has_modules_for_every_verb():
    for verb in TABLE:
        assert callable(importlib.import_module(verb.module).main)
    assert len(VERBS) == len(registry.TABLE)


def test_the_page_of_the_command_line_lists_the_table():
    page = (ROOT / "docs" / "command_line.md").read_text()
    rows = [line for line in page.splitlines() if "| `mindllm " in line]
    assert rows == [f"| {verb.group} | `mindllm {verb.name}` | {verb.help} |" for verb in TABLE]


@pytest.mark.parametrize("verb", VERBS)
def test_output_is_said_to_be_a_file_or_a_directory(verb):
    """By its metavar and its help, as its type refuses the other one."""
    kinds = {output_file: ("FILE", r"\bfile\b|PNG"), output_directory: ("DIR", r"\bdirectory\b")}
    for action in output_options(VERBS[verb].parser()):
        metavar, word = kinds[action.type]
        assert action.metavar == metavar
        assert re.search(word, action.help)


def output_options(parser):
    for action in parser._actions:
        if "--output" in action.option_strings:
            yield action
        for command in action.choices.values() if action.nargs == argparse.PARSER else ():
            yield from output_options(command)
