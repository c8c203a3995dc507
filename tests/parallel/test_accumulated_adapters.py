"""Accumulation beside frozen weights: the compiler is told which gradient ends the backward pass of a part."""

from __future__ import annotations

import pytest

from mindllm.config import ModelConfig
from mindllm.families import with_file_names
from mindllm.finetune.transform import build_tuned_model
from mindllm.parallel.operators import operators
from mindllm.parallel.pipeline import mark_where_parts_end

SIZES = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
    "seq_length": 8,
}
TUNED = {
    "all": (None, "model.tok_embeddings.gather"),
    "adapters": ({"lora_rank": 4}, "model.layers.0.attention.wq.adapter.down"),
    "adapters of w2": ({"lora_rank": 4, "target_modules": ["w2"]}, "model.layers.0.feed_forward.w2.adapter.down"),
    "bottlenecks": ({"pet_type": "bottleneck", "adapter_length": 4}, "model.layers.0.attention_adapter.down.matmul"),
    "new layers": ({"pet_type": "llamapro", "num_new_blocks": 1}, "model.layers.2.attention_norm.norm"),
    "head": ({"pet_type": "full", "freeze_exclude": ["lm_head*"]}, "lm_head.matmul"),
}


@pytest.mark.parametrize("name", TUNED)
def test_a_part_ends_with_the_gradient_of_the_first_trained_weight(name):
    pet, first = TUNED[name]
    lm = build_tuned_model(with_file_names(ModelConfig.model_validate({**SIZES, "pet_config": pet or None})))
    mark_where_parts_end(lm)
    marked = [path for path, item in operators(lm).items() if "first_parameter_cnode" in item.get_attr_dict()]
    assert marked == [first]
