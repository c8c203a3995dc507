"""Frozen matrices in half precision: what they are held in, and that nothing else changes."""

from __future__ import annotations

import mindspore as ms
import pytest
from tuned_runs import batch, tuned_run

from mindllm.errors import UserError
from mindllm.finetune.transform import build_tuned_model
from mindllm.train.engine import ReplicaEngine

HALF = {"frozen_dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_matrices_that_are_not_trained_are_held_in_it():
    pet = {"lora_rank": 4, "target_modules": ["wq"], "modules_to_save": ["lm_head"], **HALF}
    model = tuned_run(pet).model.config
    on_cpu = {item.name: item for item in build_tuned_model(model).get_parameters()}
    on_device = {item.name: item for item in build_tuned_model(model, "Ascend").get_parameters()}
    held = {name for name, item in on_cpu.items() if item.dtype == ms.bfloat16}
    assert {"model.layers.0.attention.wq.weight", "model.layers.1.feed_forward.w2.weight"} <= held
    assert not any("norm" in name or "lora" in name or name == "lm_head.weight" for name in held)
    assert {name for name, item in on_device.items() if item.dtype == ms.bfloat16} - held == {
        "model.tok_embeddings.embedding_weight"
    }


@pytest.mark.parametrize("target", ["CPU", "Ascend"])
@pytest.mark.parametrize("grouped", [False, True])
def test_matrices_of_experts_are_too(target, grouped):
    experts = {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2, "moe_grouped_gemm": grouped}
    pet = {"lora_rank": 4, "target_modules": ["wq"], **HALF}
    model = tuned_run(pet, **experts).model.config
    found = [item.dtype for item in build_tuned_model(model, target).get_parameters() if ".experts." in item.name]
    assert len(found) == 3 * model.num_layers
    assert set(found) == {ms.bfloat16}


def test_a_step_in_bf16_is_the_same_to_the_bit():
    """Products read the weights rounded in both cases."""
    losses = []
    for more in ({}, HALF):
        engine = ReplicaEngine(tuned_run({"lora_rank": 4, **more}, compute_dtype="bfloat16"))
        losses.append([engine.step(batch(seed), 1e-2, 1.0).loss for seed in range(2)])
    assert losses[0] == losses[1]


def test_lengths_of_rows_are_those_of_the_rounded_rows():
    pet = {"lora_rank": 4, "use_dora": True}
    losses = [ReplicaEngine(tuned_run({**pet, **more})).step(batch(0), 1e-2, 1.0).loss for more in ({}, HALF)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] != losses[1]


def test_kinds_without_a_frozen_base_refuse_it():
    with pytest.raises(UserError, match="frozen_dtype"):
        tuned_run({"pet_type": "galore", **HALF})
