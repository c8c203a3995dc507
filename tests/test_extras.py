"""The package: its extras, its commands, and what is said where a library of an extra is missing."""

import importlib
import sys
from pathlib import Path

import pytest

from mindllm.command import run_command
from mindllm.extras import EXTRAS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names_of(requirements):
    names = (item.split("[")[0].split("<")[0].split(">")[0].split("=")[0].strip() for item in requirements)
    return {name.removesuffix("-skinny") for name in names}


def test_extras_are_those_of_the_package(project):
    extras = project["optional-dependencies"]
    for module, extra in EXTRAS.items():
        assert module in names_of(extras[extra])
        assert module not in names_of(project["dependencies"])
    assert extras["all"] == ["mindllm[planner,plots,data,eval,gguf,fetch]"]
    assert "mindllm[all,docs,ray,tensorboard,wandb,mlflow]" in extras["test"]


def test_commands_exist(project):
    assert set(project["scripts"]) == {"mindllm"}
    for place in project["scripts"].values():
        module, name = place.split(":")
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_a_missing_library_is_one_line_with_its_extra(module, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)

    def main(arguments):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ModuleNotFoundError(str(error), name=module) from error

    with pytest.raises(SystemExit) as left:
        run_command(main, [])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"pip install 'mindllm[{extra}]'" in said


def test_a_missing_module_of_ours_is_not_hidden():
    def main(arguments):
        importlib.import_module("mindllm.no_such_module")

    with pytest.raises(ModuleNotFoundError):
        run_command(main, [])


def test_help_of_the_planner_imports_no_solver():
    code = (
        "import sys; import mindllm.cli.plan as m; m.make_parser();"
        "print([n for n in ('mindspore', 'scipy', 'highspy', 'matplotlib') if n in sys.modules])"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
