"""The wheel: one top-level name, every file of the package, and every verb of it outside a checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from mindllm.cli.registry import TABLE

ROOT = Path(__file__).parents[2]
TINY = "configs/llama2/pretrain_llama2_tiny.yaml"


def without_checkout():
    """Return the environment without the path by which other tests find this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources: setuptools leaves a directory beside them."""
    sources = tmp_path_factory.mktemp("sources")
    for name in ("mindllm", "toolkit", "configs"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, sources)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, sources / "dist", sources], check=True, capture_output=True, env=without_checkout())
    return next((sources / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The command ``mindllm`` of an environment with the wheel and, borrowed from this one, what it needs."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # a .pth in there is not read
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True, env=without_checkout())
    return environment / "bin" / "mindllm"


@pytest.fixture
def call(installed, tmp_path):
    """Runs the command in an empty directory."""
    variables = without_checkout()

    def run(*arguments, program=installed):
        return subprocess.run(
            [program, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=120
        )

    return run


def test_one_top_level_name_and_every_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"mindllm"}
    files = {path for path in (ROOT / "mindllm").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.relative_to(ROOT).as_posix() for path in files} - names == set()
    shipped = {f"mindllm/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert shipped <= names


def test_it_is_the_installed_package_that_runs(call, installed):
    asked = "import mindllm, importlib.util; print(importlib.util.find_spec('toolkit'), mindllm.__file__)"
    toolkit, file = call("-c", asked, program=installed.with_name("python")).stdout.split()
    assert toolkit == "None"
    assert Path(file).is_relative_to(installed.parents[1])


def test_every_verb_is_there(call):
    overview = call("--help")
    assert overview.returncode == 0
    for verb in TABLE:
        done = call(verb.name, "--help")
        assert (done.returncode, done.stderr) == (0, ""), verb.name
        assert done.stdout.startswith(f"usage: mindllm {verb.name} ")


def test_a_verb_works_on_a_configuration_that_comes_with_it(call):
    done = call("time", "--config", TINY, "--batch_size", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "s a step" in done.stdout


def test_the_launcher_finds_its_script(call):
    assert call("launch", "--workers", "1", "--check", f"run_llm.py --config {TINY}").returncode == 0
    done = call("launch", "--workers", "1", f"train --config {TINY} --no_such_key 1")
    assert done.returncode == 2
    assert "no_such_key: unknown key" in done.stdout
