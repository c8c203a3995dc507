"""Five steps beside PEFT with ``torch.optim.AdamW``: losses, first gradients and trained weights of every kind of adapter."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from hugging_face import hugging_face_llama  # noqa: E402
from peft.optimizers import create_loraplus_optimizer  # noqa: E402
from test_llama_torch import LENGTH, VOCABULARY, random_batch, torch_loss  # noqa: E402

from mindllm.architecture.adapters import MAGNITUDE, VALUES  # noqa: E402
from mindllm.architecture.optimizer_state import IMPORTANCE, UNCERTAINTY  # noqa: E402
from mindllm.config import ModelConfig, RunConfig  # noqa: E402
from mindllm.config.optimizer import OptimizerConfig  # noqa: E402
from mindllm.families import with_file_names  # noqa: E402
from mindllm.finetune.transform import build_tuned_model  # noqa: E402
from mindllm.models import build_model  # noqa: E402
from mindllm.models.weights import assign, model_weights, trained_weights  # noqa: E402
from mindllm.train.optimizers.adamw import AdamW  # noqa: E402
from mindllm.train.optimizers.build import make_optimizer  # noqa: E402
from mindllm.train.step import TrainStep  # noqa: E402
from mindllm.weight_files import initial_weights  # noqa: E402
from mindllm.weight_files.peft import write_peft  # noqa: E402
from mindllm.weight_files.peft_reading import read_peft  # noqa: E402

STEPS, RATE = 5, 1e-2
OPTIMIZER = OptimizerConfig(eps=1e-4, weight_decay=0.0)
FIELDS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "n_kv_heads": 2,
    "intermediate_size": 48,
    "seq_length": LENGTH,
}
KINDS = {
    "lora, some modules": {"target_modules": ["wq", "wv", "w2"], "modules_to_save": ["norm_out"]},
    "rslora, lora+": {"use_rslora": True, "lora_plus_lr_ratio": 16.0},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_are_those_of_peft(kind, tmp_path):
    pet = {"lora_rank": 4, "lora_alpha": 10.0, **KINDS[kind]}
    config = with_file_names(ModelConfig.model_validate({**FIELDS, "pet_config": pet}))
    random, model = np.random.default_rng(0), build_tuned_model(config)
    shapes = config.architecture.weight_shapes()
    base = {
        name: random.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in config.base.architecture.weight_shapes().items()
    }
    start = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()} | initial_weights(
        config, base
    )
    start = {name: np.asarray(value) * (1.3 if MAGNITUDE in name else 1.0) for name, value in start.items()}
    assign(model_weights(model), start)
    trained = {name: start[name] for name in trained_weights(model)}
    theirs = beside(config, base, trained, tmp_path / "adapter")
    parameters = list(trained_weights(model).values())
    optimizer = AdamW(parameters, OPTIMIZER, pet=config.pet_config)
    step, opponent = TrainStep(model, optimizer, None).set_train(), optimizer_of(theirs, config)
    for count in range(STEPS):
        inputs, labels, mask = random_batch(count)
        loss, *_ = step(*map(Tensor, (inputs, labels, mask)), Tensor(RATE, ms.float32), Tensor(1.0, ms.float32))
        wanted = torch_loss(theirs, inputs, labels, mask)
        assert float(loss) == pytest.approx(wanted.item(), abs=2e-5), count
        wanted.backward()
        if count == 0:
            gradients = read_back(theirs, config, tmp_path / "gradients", gradients=True)
            moments = {item.name: item.asnumpy() / (1 - OPTIMIZER.betas[0]) for item in optimizer.moments1}
            close({name: moments[f"adam_m.{name}"] for name in trained}, gradients)
        opponent.step()
        opponent.zero_grad()
    close({item.name: item.asnumpy() for item in parameters}, read_back(theirs, config, tmp_path / "after"))
    frozen = {name: item.asnumpy() for name, item in model_weights(model).items() if name not in trained}
    assert all(np.array_equal(value, start[name]) for name, value in frozen.items())


BUDGET = {"adalora_init_r": 5, "adalora_target_r": 2, "adalora_tinit": 1, "adalora_tfinal": 1}
MEANS = {"adalora_beta1": 0.5, "adalora_beta2": 0.95}


def test_five_steps_of_adalora_are_those_of_peft(tmp_path):
    """A step before ranks are removed, two that remove some, the last choice, and a step that keeps to it."""
    pet = {"pet_type": "adalora", "lora_alpha": 10.0, "modules_to_save": ["norm_out"], **BUDGET, **MEANS}
    run = RunConfig.model_validate(
        {
            "model": {"model_config": {**FIELDS, "pet_config": pet}},
            "optimizer": OPTIMIZER.model_dump(),
            "runner_config": {"batch_size": 1, "train_steps": STEPS},
        }
    )
    config = with_file_names(run.model.config)
    random, model = np.random.default_rng(0), build_tuned_model(config)
    start = {
        name: random.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in config.architecture.weight_shapes().items()
    }
    assign(model_weights(model), start)
    trained = {name: start[name] for name in trained_weights(model)}
    theirs = beside(
        config, {name: start[name] for name in config.base.architecture.weight_shapes()}, trained, tmp_path / "a"
    )
    theirs.peft_config["default"].total_step = STEPS
    parameters = list(trained_weights(model).values())
    step, opponent = TrainStep(model, make_optimizer(parameters, run), None).set_train(), optimizer_of(theirs, config)
    values = [item for item in parameters if item.name.endswith(VALUES)]
    kept = []
    for count in range(STEPS):
        inputs, labels, mask = random_batch(count)
        loss, *_ = step(*map(Tensor, (inputs, labels, mask)), Tensor(RATE, ms.float32), Tensor(1.0, ms.float32))
        wanted = torch_loss(theirs, inputs, labels, mask)
        assert float(loss) == pytest.approx(wanted.item(), abs=2e-5), count
        tokens = torch.tensor(inputs.astype(np.int64))
        penalty = theirs(tokens, labels=tokens).loss - theirs.base_model.model(tokens, labels=tokens).loss
        (wanted + penalty).backward()
        opponent.step()
        theirs.base_model.update_and_allocate(count + 1)
        opponent.zero_grad()
        if count < STEPS - 2:  # then PEFT forgets them
            close_means(step, theirs.base_model.rankallocator)
        found = np.array([np.count_nonzero(item.asnumpy()) for item in values])
        others = [
            np.count_nonzero(item.detach().numpy()) for name, item in theirs.named_parameters() if "lora_E" in name
        ]
        assert sorted(found) == sorted(others)
        kept.append(found.sum())
    assert kept[0] == 5 * len(values)
    assert kept[0] > kept[1] > kept[2] >= kept[3] == kept[4] == 2 * len(values)
    theirs.peft_config["default"].rank_pattern = None  # or files leave out the ranks that were removed
    close({item.name: item.asnumpy() for item in parameters}, read_back(theirs, config, tmp_path / "after"))


def close_means(step, allocator):
    """Importance of every weight of an adapter, and how it changes: means with decays of their own."""
    state = {item.name: item.asnumpy() for item in step.get_parameters()}
    for kind, theirs in ((IMPORTANCE, allocator.exp_avg_ipt), (UNCERTAINTY, allocator.exp_avg_unc)):
        own = sorted(float(value.sum()) for name, value in state.items() if name.startswith(f"{kind}."))
        assert own == pytest.approx(sorted(float(value.sum()) for value in theirs.values()), rel=1e-3)


def beside(config, base, trained, directory):
    """PEFT's model with the same weights, trained as ours."""
    plain = build_model(config.base)
    assign(trained_weights(plain), base)
    write_peft(directory, config, trained, None)
    return peft.PeftModel.from_pretrained(hugging_face_llama(plain, config), directory, is_trainable=True)


def optimizer_of(theirs, config):
    ratio = config.pet_config.lora_plus_lr_ratio
    options = {"lr": RATE, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "weight_decay": 0.0}
    if ratio is None:
        return torch.optim.AdamW([item for item in theirs.parameters() if item.requires_grad], **options)
    return create_loraplus_optimizer(theirs, torch.optim.AdamW, loraplus_lr_ratio=ratio, **options)


def read_back(theirs, config, directory, gradients=False):
    """Their trained weights, or the gradients of these, by our names."""
    if gradients:
        values = {name: item.detach().clone() for name, item in theirs.named_parameters()}
        with torch.no_grad():
            for item in theirs.parameters():
                if item.grad is not None:
                    item.copy_(item.grad)
    theirs.save_pretrained(directory)
    if gradients:
        with torch.no_grad():
            for name, item in theirs.named_parameters():
                item.copy_(values[name])
    return read_peft(directory, config.base).weights


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        scale = np.abs(np.asarray(wanted)).max()
        assert np.abs(ours[name] - np.asarray(wanted)).max() <= 2e-4 * max(scale, 1e-3), name
