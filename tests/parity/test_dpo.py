"""Preference losses beside independent ones in PyTorch: PEFT's model is the policy, with its adapter disabled the reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from test_llama_torch import VOCABULARY  # noqa: E402
from test_peft_training import FIELDS, beside, read_back  # noqa: E402

from mindllm.config import ModelConfig  # noqa: E402
from mindllm.config.tuning import PreferenceConfig  # noqa: E402
from mindllm.data.chat.pairs import pair_sample  # noqa: E402
from mindllm.data.rows import Row  # noqa: E402
from mindllm.families import with_file_names  # noqa: E402
from mindllm.finetune.preference import PreferenceLoss, make_reference  # noqa: E402
from mindllm.finetune.transform import tune  # noqa: E402
from mindllm.models import CausalLM, Kernels  # noqa: E402
from mindllm.models.weights import assign, model_weights, trained_weights  # noqa: E402
from mindllm.train.callbacks.figures import pair_figures  # noqa: E402
from mindllm.train.step import ForwardBackward  # noqa: E402

LENGTH = 40
LOSSES = {
    "sigmoid": {"beta": 0.3},
    "smoothed": {"beta": 0.3, "label_smoothing": 0.2},
    "hinge": {"beta": 0.5, "loss_type": "hinge"},
    "ipo": {"beta": 0.2, "loss_type": "ipo"},
    "orpo": {"beta": 0.7, "loss_type": "orpo"},
    "simpo": {"beta": 2.5, "loss_type": "simpo", "simpo_gamma": 0.9},
}


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Policy and reference of ours, and PEFT's model, with the same weights; adapters far from nothing."""
    pet = {"lora_rank": 4, "lora_alpha": 10.0, "target_modules": ["wq", "wv", "w2"]}
    config = with_file_names(ModelConfig.model_validate({**FIELDS, "seq_length": LENGTH, "pet_config": pet}))
    kernels = replace(Kernels.choose(config, "CPU"), document_masks=True)
    policy = CausalLM(config, kernels)
    tune(policy, config, kernels)
    random = np.random.default_rng(0)
    start = {
        name: random.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in config.architecture.weight_shapes().items()
    }
    assign(model_weights(policy), start)
    base = {name: start[name] for name in config.base.architecture.weight_shapes()}
    trained = {name: start[name] for name in trained_weights(policy)}
    theirs = beside(config, base, trained, tmp_path_factory.mktemp("adapter") / "a")
    return SimpleNamespace(config=config, policy=policy, kernels=kernels, theirs=theirs, start=start)


def random_pairs(count=3):
    """Rows of chosen and rejected, whose last words are the answer."""
    random = np.random.default_rng(5)

    def row(length):
        tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
        return Row(tokens, np.arange(length) >= length // 3)

    return [(row(int(random.integers(8, 20))), row(int(random.integers(8, 20)))) for _ in range(count)]


def their_logps(model, row):
    tokens = torch.tensor(row.tokens[None].astype(np.int64))
    logits = model(input_ids=tokens).logits[0, :-1].float()
    picked = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
    mask = torch.tensor(row.trained[1:].astype(np.float32))
    return (picked * mask).sum(), mask.sum()


def their_loss(model, pairs, options):
    """The published formulas, pair by pair, and the mean figures: arXiv 2305.18290, eq. 7; 2305.10425; 2310.12036; ORPO:
    2403.07691, eq. 4 to 7; SimPO: 2405.14734, eq. 6.
    """
    beta, smoothing = options["beta"], options.get("label_smoothing", 0.0)
    losses, figures = [], []
    for pair in pairs:
        (chosen, n), (rejected, m) = (their_logps(model, row) for row in pair)
        with model.disable_adapter(), torch.no_grad():
            (base_chosen, _), (base_rejected, _) = (their_logps(model, row) for row in pair)
        gain, loss_of = (chosen - base_chosen, rejected - base_rejected), options.get("loss_type", "sigmoid")
        logits = beta * (gain[0] - gain[1])
        if loss_of in ("orpo", "simpo"):
            gain = (chosen / n, rejected / m)
            odds = [torch.exp(one) / (1 - torch.exp(one)) for one in gain]
            if loss_of == "orpo":
                losses.append(-gain[0] - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
            else:
                losses.append(-torch.log(torch.sigmoid(beta * gain[0] - beta * gain[1] - options["simpo_gamma"])))
        elif loss_of == "sigmoid":
            log_sigmoid = torch.nn.functional.logsigmoid
            losses.append(-log_sigmoid(logits) * (1 - smoothing) - log_sigmoid(-logits) * smoothing)
        elif loss_of == "hinge":
            losses.append(torch.relu(1 - logits))
        else:
            losses.append((gain[0] / n - gain[1] / m - 1 / (2 * beta)) ** 2)
        right = float(gain[0] > gain[1])
        figures.append([beta * float(gain[0]), beta * float(gain[1]), right, float(chosen), float(rejected)])
    return torch.stack(losses).sum(), np.mean(figures, axis=0)


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_gradients_and_figures_are_those_of_the_published_formula(kind, sides, tmp_path):
    pairs, options = random_pairs(), LOSSES[kind]
    section = PreferenceConfig.model_validate(options)
    reference = make_reference(sides.policy, sides.config, sides.kernels) if section.has_reference else None
    cell = PreferenceLoss(sides.policy, reference, section, LENGTH)
    samples = [*(pair_sample(pair, LENGTH) for pair in pairs), pair_sample([], LENGTH)]  # the last one is padding
    batch = {name: Tensor(np.stack([sample[name] for sample in samples])) for name in samples[0]}
    weights = ParameterTuple(cell.trainable_params())
    columns = [batch[name] for name in ("input_ids", "labels", "loss_mask")]
    positions = float(len(samples) * LENGTH)
    loss, count, gradients = ForwardBackward(cell, weights)(
        *columns, Tensor(positions, ms.float32), batch["segment_starts"], batch["position_ids"]
    )
    sides.theirs.zero_grad()
    wanted, figures = their_loss(sides.theirs, pairs, options)
    wanted.backward()
    assert int(count) == len(pairs)
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-4)
    ours = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients, strict=True)}
    counted = pair_figures({"load.pairs.probe": ours.pop("pairs.probe")})
    assert list(counted.values())[:5] == pytest.approx(figures, abs=1e-4)
    theirs = read_back(sides.theirs, sides.config, tmp_path / "gradients", gradients=True)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        gradient = np.asarray(gradient)
        assert np.abs(ours[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-3), name


def test_the_reference_has_the_weights_of_the_policy_and_no_others(sides):
    reference = make_reference(sides.policy, sides.config, sides.kernels)
    own = {item.name: item for item in sides.policy.get_parameters()}
    assert all(item is own[item.name] for item in reference.get_parameters())
    assert {item.name for item in own.values()} - {item.name for item in reference.get_parameters()} == set(
        trained_weights(sides.policy)
    )
