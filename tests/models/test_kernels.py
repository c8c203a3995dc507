"""Which operators are chosen for a device."""

import pytest

from mindllm.config import ModelConfig
from mindllm.models.kernels import Kernels

SIZES = {"vocab_size": 16, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "seq_length": 8, "intermediate_size": 16}


@pytest.mark.parametrize("asked", [True, False, "auto"])
@pytest.mark.parametrize("target", ["CPU", "Ascend"])
def test_attention_is_fused_where_a_device_can_unless_it_shall_not(asked, target):
    model = ModelConfig(**SIZES, use_flash_attention=asked)
    assert Kernels.choose(model, target).flash_attention == (target == "Ascend" and asked is not False)


def test_soft_caps_are_not_fused():
    assert not Kernels.choose(ModelConfig(**SIZES, attn_logit_softcapping=30.0), "Ascend").flash_attention
