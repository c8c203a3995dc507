"""What is drawn in a graph: the right share and spread, other numbers at other steps and places, the same for the same key."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindllm.config import ModelConfig
from mindllm.models.weights import model_weights
from mindllm.tune.draw import Draw, Dropout, EmbeddingNoise, factors
from mindllm.tune.transform import build_tuned_model

ROWS, WIDTH, SHARE = 512, 64, 0.2


class Both(nn.Cell):
    def __init__(self):
        super().__init__()
        self.draw = Draw()
        self.dropout = Dropout(SHARE, WIDTH, "one", self.draw)
        self.other = Dropout(SHARE, WIDTH, "other", self.draw)
        self.noise = EmbeddingNoise(5.0, 16, WIDTH, self.draw)

    def construct(self, x):
        return self.dropout(x), self.other(x), self.noise(x)


@pytest.fixture(scope="module")
def drawn(_one_device):
    """What steps 0, 1 and 0 again, and an evaluation, make of ones."""
    ms.set_context(mode=ms.GRAPH_MODE)
    cell, ones = Both(), Tensor(np.ones((ROWS, WIDTH)), ms.float32)
    outputs = []
    for step in (0, 1, 0, None):
        cell.draw.end() if step is None else cell.draw.begin(7, step)
        outputs.append([item.asnumpy().copy() for item in cell(ones)])
    return outputs


def test_dropout_keeps_a_share_and_the_mean(drawn):
    kept = drawn[0][0] > 0
    assert kept.mean() == pytest.approx(1 - SHARE, abs=0.01)
    np.testing.assert_allclose(drawn[0][0][kept], 1 / (1 - SHARE), rtol=1e-6)
    assert np.abs(kept.mean(0) - (1 - SHARE)).max() < 0.1, "columns"
    assert np.abs(kept.mean(1) - (1 - SHARE)).max() < 0.25, "rows"


def test_noise_is_uniform_within_its_strength(drawn):
    noise, strength = drawn[0][2] - 1, 5.0 / np.sqrt(16 * WIDTH)
    assert np.abs(noise).max() <= strength + 1e-6
    assert noise.mean() == pytest.approx(0, abs=0.01 * strength)
    assert noise.std() == pytest.approx(strength / np.sqrt(3), rel=0.02)


def test_steps_and_places_differ_and_a_repeated_step_does_not(drawn):
    (first, other, noise), (later, *_), again, evaluated = drawn
    expected = (1 - SHARE) ** 2 + SHARE**2  # of independent masks, this share agrees
    for mask in (other, later):
        assert ((first > 0) == (mask > 0)).mean() == pytest.approx(expected, abs=0.02)
    for found, wanted in zip(again, (first, other, noise), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for untouched in evaluated:
        np.testing.assert_array_equal(untouched, 1.0)


def test_factors_are_odd():
    assert (factors(100, "key") % 2 == 1).all()


def test_parameters_of_a_tuned_model_have_names_of_their_own():
    """A graph from the compile cache finds its parameters by name: equal ones would all be the last of them."""
    pet = {"lora_rank": 4, "lora_dropout": 0.2, "neftune_noise_alpha": 5.0, "use_dora": True}
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_length": 16}
    model = build_tuned_model(ModelConfig.model_validate({**sizes, "pet_config": pet}))
    names = [parameter.name for parameter in model.get_parameters()]
    assert len(names) == len(set(names))
    assert {name for name in names if name.startswith("draw.")} == {"draw.key", "draw.active"}
    assert model_weights(model).keys() == model_shapes(sizes, pet).keys()


def model_shapes(sizes, pet):
    return ModelConfig.model_validate({**sizes, "pet_config": pet}).architecture.weight_shapes()
