"""KTO beside TRL's formula in PyTorch (``kto_loss`` in ``trl/trainer/kto_trainer.py``).

PEFT's model is the policy, with its adapter disabled the reference.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from test_dpo import LENGTH, sides, their_logps  # noqa: E402, F401
from test_llama_torch import VOCABULARY  # noqa: E402
from test_peft_training import read_back  # noqa: E402

from mindllm.config.tuning import PreferenceConfig  # noqa: E402
from mindllm.data.chat.pairs import pair_sample  # noqa: E402
from mindllm.data.rows import Row  # noqa: E402
from mindllm.finetune.preference import PreferenceLoss, make_reference  # noqa: E402
from mindllm.train.callbacks.figures import unpaired_figures  # noqa: E402
from mindllm.train.step import ForwardBackward  # noqa: E402

DESIRABLE = (True, False, False, True, True)
CASES = {
    "beyond the distance": (1, {"beta": 0.3, "loss_type": "kto"}),
    "a distance below nothing": (3, {"beta": 0.3, "loss_type": "kto"}),
    "weights": (1, {"beta": 0.5, "loss_type": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.4}),
    "none": (1, {"beta": 0.3, "loss_type": "apo_zero_unpaired"}),
}


def questions_and_answers(seed):
    """Rows of a question with its own answer, and with that of the row before."""
    random = np.random.default_rng(seed)
    words = [[random.integers(0, VOCABULARY, int(random.integers(3, 9))) for _ in "qa"] for _ in DESIRABLE]

    def row(question, answer):
        tokens = np.concatenate([question, answer]).astype(np.int32)
        return Row(tokens, np.arange(len(tokens)) >= len(question))

    return [
        (row(question, answer), row(question, words[number - 1][1])) for number, (question, answer) in enumerate(words)
    ]


def their_loss(model, rows, options):
    """TRL's losses of all rows, their sum and figures; names are those of its source."""
    beta = options["beta"]
    policy, policy_kl = (torch.stack([their_logps(model, row[side])[0] for row in rows]) for side in (0, 1))
    with model.disable_adapter(), torch.no_grad():
        reference, reference_kl = (torch.stack([their_logps(model, row[side])[0] for row in rows]) for side in (0, 1))
    kl = torch.zeros(1)
    if options["loss_type"] == "kto":
        kl = (policy_kl - reference_kl).mean().detach().clamp(min=0)
    labels = torch.tensor(DESIRABLE)
    chosen_logratios, rejected_logratios = (policy - reference)[labels], (policy - reference)[~labels]
    chosen_losses = 1 - torch.sigmoid(beta * (chosen_logratios - kl))
    rejected_losses = 1 - torch.sigmoid(beta * (kl - rejected_logratios))
    losses = torch.cat([
        options.get("desirable_weight", 1.0) * chosen_losses,
        options.get("undesirable_weight", 1.0) * rejected_losses,
    ])  # fmt: skip
    figures = {
        "rewards/chosen": beta * chosen_logratios.mean().item(),
        "rewards/rejected": beta * rejected_logratios.mean().item(),
        "logps/chosen": policy[labels].mean().item(),
        "logps/rejected": policy[~labels].mean().item(),
        "kl": kl.item(),
    }
    return losses.sum(), figures | {"rewards/margins": figures["rewards/chosen"] - figures["rewards/rejected"]}


def batch_of(rows):
    """Columns ``[rows + 1, seq]``; the last row is padding."""
    samples = [pair_sample(row, LENGTH) for row in rows]
    for sample, desirable in zip(samples, DESIRABLE, strict=True):
        sample["loss_mask"] = np.roll(sample["loss_mask"], int(not desirable))
    samples.append(pair_sample([], LENGTH))
    return {name: Tensor(np.stack([sample[name] for sample in samples])) for name in samples[0]}


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_figures_are_those_of_trl(case, sides, tmp_path):  # noqa: F811
    seed, options = CASES[case]
    rows = questions_and_answers(seed)
    reference = make_reference(sides.policy, sides.config, sides.kernels)
    cell = PreferenceLoss(sides.policy, reference, PreferenceConfig.model_validate(options), LENGTH)
    batch = batch_of(rows)
    weights = ParameterTuple(cell.trainable_params())
    columns = [batch[name] for name in ("input_ids", "labels", "loss_mask")]
    positions = Tensor(float(columns[0].size), ms.float32)
    loss, count, gradients = ForwardBackward(cell, weights)(
        *columns, positions, batch["segment_starts"], batch["position_ids"]
    )
    sides.theirs.zero_grad()
    wanted, figures = their_loss(sides.theirs, rows, options)
    wanted.backward()
    assert int(count) == len(rows)
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-4)
    ours = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients, strict=True)}
    assert unpaired_figures({"load.pairs.probe": ours.pop("pairs.probe")}) == pytest.approx(figures, abs=1e-4)
    assert (figures["kl"] > 0) == (case in ("beyond the distance", "weights"))
    theirs = read_back(sides.theirs, sides.config, tmp_path / "gradients", gradients=True)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        gradient = np.asarray(gradient)
        assert np.abs(ours[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 1e-3), name
