"""Names of earlier releases are read, and answered with the new one."""

from __future__ import annotations

import logging

import pytest

from mindllm.config import ModelConfig
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError


def test_a_former_key_is_read_and_told(load, caplog):
    with caplog.at_level(logging.WARNING):
        config = load("--model.model_config.quantised_base=float32")
    assert config.model.config.quantized_base == "dequantize"
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        "model.model_config.quantised_base: a former name; write model.model_config.quantized_base: dequantize" in said
    )


def test_a_former_key_in_a_yaml_is_told_with_its_line(load, write, minimal, caplog):
    minimal["model"]["model_config"]["quantised_base"] = "codes"
    path = write(minimal)
    with caplog.at_level(logging.WARNING):
        from mindllm.config import load_config

        assert load_config(path).model.config.quantized_base == "keep"
    assert f"{path}:" in caplog.text


def test_both_names_are_a_mistake(minimal, write):
    from mindllm.config import load_config

    minimal["model"]["model_config"] |= {"quantised_base": "codes", "quantized_base": "keep"}
    with pytest.raises(UserError, match=r"another name of model\.model_config\.quantized_base"):
        load_config(write(minimal))


def test_what_checkpoints_of_earlier_releases_say_is_read(minimal):
    former = minimal["model"]["model_config"] | {"quantised_base": "float32"}
    assert ModelConfig.model_validate(former).quantized_base == "dequantize"
    assert PetConfig(pet_type="adapter") == PetConfig(pet_type="bottleneck")
