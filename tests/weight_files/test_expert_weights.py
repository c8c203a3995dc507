"""Experts in files: one tensor each, or all in one; no more is read than asked for."""

import numpy as np

from mindllm.families.mistral import MIXTRAL
from mindllm.families.qwen import QWEN3_MOE
from mindllm.weight_files.family_weights import slice_expert, split_fused_experts, stack_experts

LAYER = "model.layers.3.mlp"


class Read:
    """A tensor that remembers which experts were asked for."""

    def __init__(self, values):
        self.values, self.shape, self.dtype, self.asked = values, values.shape, values.dtype, []

    def read(self, slices):
        self.asked.append(slices)
        return self.values[slices]


def test_a_stack_of_experts_is_taken_apart_into_the_names_of_other_files():
    both, down = np.arange(24.0).reshape(2, 4, 3), np.arange(12.0).reshape(2, 3, 2)
    found = {f"{LAYER}.experts.gate_up_proj": both, f"{LAYER}.experts.down_proj": down, "lm_head.weight": both}
    apart = split_fused_experts(found, QWEN3_MOE.weights)
    assert sorted(apart) == [
        "lm_head.weight",
        *(f"{LAYER}.experts.{e}.{part}_proj.weight" for e in (0, 1) for part in ("down", "gate", "up")),
    ]
    np.testing.assert_array_equal(np.asarray(apart[f"{LAYER}.experts.1.gate_proj.weight"]), both[1, :2])
    np.testing.assert_array_equal(np.asarray(apart[f"{LAYER}.experts.1.up_proj.weight"]), both[1, 2:])
    np.testing.assert_array_equal(np.asarray(apart[f"{LAYER}.experts.0.down_proj.weight"]), down[0])


def test_the_newest_files_of_mixtral_have_other_names():
    found = {f"{LAYER}.gate.weight": np.ones((2, 3)), f"{LAYER}.experts.gate_up_proj": np.ones((2, 4, 3))}
    below = "model.layers.3.block_sparse_moe"
    assert sorted(split_fused_experts(found, MIXTRAL.weights)) == [
        *(f"{below}.experts.{e}.{part}.weight" for e in (0, 1) for part in ("w1", "w3")),
        f"{below}.gate.weight",
    ]


def test_a_rank_reads_its_experts_and_no_others():
    parts = [Read(np.full((4, 3), float(expert))) for expert in range(4)]
    stack = stack_experts(parts)
    assert stack.shape == (4, 4, 3)
    own = stack.read((slice(2, 4), slice(0, 2), slice(0, 3)))
    assert [len(part.asked) for part in parts] == [0, 0, 1, 1]
    np.testing.assert_array_equal(own, np.stack([np.full((2, 3), 2.0), np.full((2, 3), 3.0)]))
    whole = Read(np.arange(24.0).reshape(2, 4, 3))
    np.testing.assert_array_equal(np.asarray(slice_expert(whole, 1, 2, 4)), whole.values[1, 2:])
    assert whole.asked[0][0] == slice(1, 2)
