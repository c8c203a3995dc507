"""Adapters of every family in PEFT's format, both ways: what PEFT computes with the files is what ours makes of them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from opponents import TINY, load, opponent  # noqa: E402

from mindllm.architecture.adapters import MAGNITUDE  # noqa: E402
from mindllm.config import read_model_config  # noqa: E402
from mindllm.config.tuning import PetConfig  # noqa: E402
from mindllm.weight_files import (  # noqa: E402
    initial_weights,
    merge_adapter,
    read_hugging_face,
    unmerge_adapter,
    write_weights,
)
from mindllm.weight_files.peft import write_peft  # noqa: E402
from mindllm.weight_files.peft_reading import read_peft  # noqa: E402

TOKENS = torch.tensor(np.random.default_rng(0).integers(3, 97, (2, 24)))
QUICK = (
    "llama",
    "glm4",
    "bloom",
    "gpt2",
)  # between them: biases, turned rows, fused matrices by half and by head, transposed ones
ONCE = [name for name in TINY if "," not in name or name.startswith("deepseek")]
PARAMETERS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ONCE]
KINDS = {
    "lora": {"lora_rank": 4, "lora_alpha": 6.0},
    "dora": {"lora_rank": 4, "use_dora": True, "modules_to_save": ("norm_out",)},
    "rslora": {"lora_rank": 4, "use_rslora": True},
    "adalora": {"pet_type": "adalora", "adalora_init_r": 4, "adalora_target_r": 2},
}


@pytest.fixture(scope="module", params=PARAMETERS)
def base(request, tmp_path_factory):
    """A tiny model of the family as a directory, and what we read of it."""
    other = opponent(request.param, tmp_path_factory.mktemp("family") / "base")
    model = read_model_config(other.directory)
    return other, model, read_hugging_face(other.directory, model)


def tuned(model, kind):
    chosen = {"target_modules": r".*\.attention\..*"} if model.expert_num > 1 else {}
    return model.model_copy(update={"pet_config": PetConfig(**KINDS[kind], **chosen)})


def random_adapter(model, weights):
    """Random values of all that is trained, near what it begins with."""
    random, start = np.random.default_rng(1), initial_weights(model, weights)
    return {
        name: (np.asarray(start[name]) if name in start else 0)
        + random.normal(0, 0.3 if MAGNITUDE in name else 0.1, shape).astype(np.float32)
        for name, shape in model.architecture.trained_shapes().items()
    }


def logits(model):
    with torch.inference_mode():
        return model(TOKENS).logits.numpy()


def assert_same(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-4 * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_with_our_files_what_our_merged_weights_compute(base, kind, tmp_path):
    other, plain, weights = base
    model = tuned(plain, kind)
    trained = random_adapter(model, weights)
    write_peft(tmp_path / "adapter", model, trained, None)
    write_weights(tmp_path / "merged", plain, merge_adapter(model, weights, trained))
    theirs = peft.PeftModel.from_pretrained(load(other.directory), tmp_path / "adapter")
    wanted = logits(theirs)
    assert np.abs(wanted - logits(load(other.directory))).max() > 1e-2
    assert_same(logits(load(tmp_path / "merged")), wanted)


def test_an_adapter_of_peft_becomes_ours_and_theirs_again(base, tmp_path):
    other, plain, weights = base
    linear = {name.rpartition(".")[2] for name, item in other.model.named_modules() if is_adapted(name, item, plain)}
    targets = sorted(linear - {"lm_head"})
    theirs = peft.get_peft_model(
        load(other.directory),
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False),
    )
    theirs.save_pretrained(tmp_path / "theirs")
    adapter = read_peft(tmp_path / "theirs", plain)
    model = adapter.model(plain)
    whole = merge_adapter(model, weights, adapter.weights)
    write_weights(tmp_path / "merged", plain, whole)
    assert_same(logits(load(tmp_path / "merged")), logits(theirs))
    back = unmerge_adapter(model, whole, adapter.weights)
    for name in weights:
        np.testing.assert_allclose(np.asarray(back[name]), np.asarray(weights[name]), atol=1e-5, err_msg=name)
    write_peft(tmp_path / "again", model, adapter.weights, None)
    again = peft.PeftModel.from_pretrained(load(other.directory), tmp_path / "again")
    assert_same(logits(again), logits(theirs))


def is_adapted(name, module, model):
    """Whether PEFT can be asked for an adapter: of a mixture's feed-forwards it adapts all experts or nothing."""
    return type(module).__name__ in ("Linear", "Conv1D") and (model.expert_num <= 1 or ".self_attn." in name)
