"""The same weights in Hugging Face's Llama: same logits, loss, gradients, and the same training."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import ModelConfig
from mindllm.config.optimizer import OptimizerConfig
from mindllm.families.llama import WEIGHTS as HUGGING_FACE
from mindllm.models import build_model
from mindllm.models.weights import assign, trained_weights
from mindllm.train.optimizers.adamw import AdamW
from mindllm.train.step import ForwardBackward, TrainStep

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hugging_face import ROPE_SCALINGS, hugging_face_llama  # noqa: E402

BATCH, LENGTH, VOCABULARY = 2, 40, 97
MODELS = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 2},
    "one key head, tied": {"n_kv_heads": 1, "tie_word_embeddings": True},
    "biased": {"n_kv_heads": 2, "qkv_has_bias": True, "attn_proj_has_bias": True},
    "linear": {"n_kv_heads": 2, "rope_scaling": ROPE_SCALINGS["linear"][0]},
    "llama3": {"n_kv_heads": 2, "rope_scaling": ROPE_SCALINGS["llama3"][0]},
}


class Logits(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, input_ids):
        return P.reshape(self.model.logits(self.model.model(input_ids)), (*input_ids.shape, -1))


def random_model(name, std=0.1):
    """A random model of each kind; the weights are larger than initial ones, so that nothing is close to linear."""
    fields = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_dim": 16}
    config = ModelConfig(**(fields | {"intermediate_size": 80, "seq_length": LENGTH} | MODELS[name]))
    model = build_model(config)
    random, weights = np.random.default_rng(0), trained_weights(model)
    assign(weights, {key: random.normal(0, std, item.shape).astype(np.float32) for key, item in weights.items()})
    return model, hugging_face_llama(model, config, ROPE_SCALINGS.get(name, (None, None))[1])


def random_batch(seed=0):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, (BATCH, LENGTH + 1)).astype(np.int32)
    mask = (random.random((BATCH, LENGTH)) < 0.8).astype(np.float32)
    return tokens[:, :-1], tokens[:, 1:], mask


def torch_loss(llama, inputs, labels, mask):
    """Mean loss of the tokens whose mask is 1."""
    logits = llama(torch.tensor(inputs, dtype=torch.long)).logits
    targets = torch.where(torch.tensor(mask) > 0, torch.tensor(labels, dtype=torch.long), -100)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal(name):
    model, llama = random_model(name)
    inputs, labels, mask = random_batch()
    logits = Logits(model)(Tensor(inputs)).asnumpy()
    expected = llama(torch.tensor(inputs, dtype=torch.long)).logits.detach().numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)

    loss = torch_loss(llama, inputs, labels, mask)
    loss.backward()
    weights = ms.ParameterTuple(model.trainable_params())
    summed, tokens, gradients = ForwardBackward(model, weights)(*map(Tensor, (inputs, labels, mask)), Tensor(1.0))
    assert float(summed / tokens) == pytest.approx(loss.item(), abs=1e-4)
    expected = {key: value.grad.numpy() for key, value in llama.named_parameters()}
    for weight, gradient in zip(weights, gradients, strict=True):
        per_token = gradient.asnumpy() * BATCH * LENGTH / mask.sum()
        np.testing.assert_allclose(
            per_token, expected[HUGGING_FACE.theirs(weight.name)], atol=1e-4, err_msg=weight.name
        )


@pytest.mark.parametrize("name", MODELS)
def test_training_equals(name):
    model, llama = random_model(name, std=0.02)
    config = OptimizerConfig()
    step = TrainStep(model, AdamW(model.trainable_params(), config), 1.0)
    step.set_train()
    matrices = [item for item in llama.parameters() if item.ndim > 1]
    others = [item for item in llama.parameters() if item.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    for count in range(5):
        rate = 1e-3 * (count + 1)
        batch = random_batch(count)
        loss, norm, *_ = step(*map(Tensor, batch), Tensor(rate, ms.float32), Tensor(1.0, ms.float32))
        expected = torch_loss(llama, *batch)
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss) == pytest.approx(expected.item(), abs=1e-4)
        assert float(norm) == pytest.approx(expected_norm.item(), rel=1e-3)


@pytest.mark.slow
def test_equal_with_graph_kernels(rerun_with_graph_kernels):
    rerun_with_graph_kernels(__file__, "llama3")
