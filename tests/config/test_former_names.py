"""Names of earlier releases are read."""

from __future__ import annotations

from mindllm.config import ModelConfig
from mindllm.config.tuning import PetConfig


def test_former_key_of_a_yaml_is_read(load):
    config = load("--model.model_config.quantised_base=float32")
    assert config.model.config.quantized_base == "dequantize"


def test_former_keys_of_checkpoints_are_read(minimal):
    former = minimal["model"]["model_config"] | {"quantised_base": "float32"}
    assert ModelConfig.model_validate(former).quantized_base == "dequantize"
    assert PetConfig(pet_type="adapter") == PetConfig(pet_type="bottleneck")
