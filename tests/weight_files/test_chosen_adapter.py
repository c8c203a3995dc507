"""Which adapter a run begins with, of one or of several, and what is told where none is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.weight_files.pretrained import chosen_adapter

TINY = Path(__file__).parents[2] / "configs/llama2/pretrain_llama2_tiny.yaml"


@pytest.fixture
def several(tmp_path):
    for name in ("poems", "python"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    return tmp_path


def chosen(directory, name=""):
    options = [f"--load_adapter={directory}", *([f"--adapter_id={name}"] if name else [])]
    return chosen_adapter(load_config(TINY, options))


def test_one_of_several_is_chosen_by_its_name(several):
    assert chosen(several, "python") == several / "python"
    assert chosen(several / "poems") == several / "poems"


@pytest.mark.parametrize(
    ("place", "name", "words"),
    [
        ("", "", "has several adapters; write one of poems, python"),
        ("", "pyton", "did you mean 'python'"),
        ("nowhere", "", "does not exist"),
    ],
)
def test_no_adapter_is_meant(several, place, name, words):
    with pytest.raises(UserError, match=words) as refused:
        chosen(several / place, name)
    assert "\n" not in str(refused.value)


def test_a_name_without_adapters_is_refused():
    with pytest.raises(UserError, match="adapter_id: chooses one of the adapters below load_adapter"):
        load_config(TINY, ["--adapter_id=python"])
