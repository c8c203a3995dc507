"""Projections in codes on devices that share them: what can be divided is accepted, what cannot is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindllm import verify
from mindllm.config import load_config
from mindllm.errors import UserError

FORM = Path(verify.__file__).parent / "forms" / "codes.yaml"
QUANTIZATION = "model.model_config.quantization_config"


def load(**changes):
    return load_config(FORM, {key.replace("__", "."): value for key, value in changes.items()})


def test_groups_that_are_divided_are_accepted():
    layer = load().model.config.architecture.layers[0]
    assert {spec.module for spec in layer.codes} >= {"attention.wq", "attention.wo", "feed_forward.w2"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"group_size": 32},
            "feed_forward.w2 in codes has 3 groups of 32 columns, which model_parallel 2 does not divide",
        ),
        ({"group_size": 0}, "attention.wo in codes has 1 groups of 64 columns"),
        ({"act_order": True}, "attention.wo in codes has reordered columns (desc_act)"),
    ],
)
def test_columns_that_devices_cannot_divide_are_refused_by_name(changes, words):
    changes = {f"{QUANTIZATION}.{key}": value for key, value in changes.items()}
    with pytest.raises(UserError) as refused:
        load_config(FORM, changes)
    assert words in str(refused.value)
    assert "attention.wq" not in str(refused.value)  # split by rows
    load_config(FORM, {**changes, "model.model_config.quantized_base": "dequantize"})
    load_config(FORM, {**changes, "parallel_config.model_parallel": 1, "parallel_config.use_seq_parallel": False})
