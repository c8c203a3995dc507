"""``import mindllm`` costs next to nothing, and gives public functions whatever else is imported."""

import subprocess
import sys

import pytest

import mindllm

HEAVY = ("mindspore", "numpy", "pydantic", "rich", "scipy", "yaml", "highspy", "lm_eval")


def modules_after(code: str) -> set[str]:
    """Return the names of the packages that a fresh interpreter has imported after ``code``."""
    show = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{show}"], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_imports_nothing_heavy():
    assert not modules_after("import mindllm; dir(mindllm); mindllm.load_config") & set(HEAVY)


def test_a_step_time_needs_no_mindspore():
    code = "import mindllm; mindllm.step_time('configs/llama2/pretrain_llama2_7b.yaml')"
    assert "mindspore" not in modules_after(code)


@pytest.mark.parametrize("name", mindllm.__all__)
def test_public_names_are_there_and_documented(name):
    assert name in dir(mindllm)
    assert callable(getattr(mindllm, name))
    assert getattr(mindllm, name).__doc__


def test_a_name_that_is_not_there_is_said():
    with pytest.raises(AttributeError, match=r"no attribute 'teach'"):
        mindllm.teach  # noqa: B018
