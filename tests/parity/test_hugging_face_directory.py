"""A directory that transformers wrote, and one that it reads: logits, gradients and greedy text are those of its own Llama."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import ops as P

from mindllm.config import read_model_config
from mindllm.config.generation import GenerationConfig
from mindllm.families.llama import WEIGHTS as HUGGING_FACE
from mindllm.generate.generator import Generator
from mindllm.models import build_model
from mindllm.models.weights import HostCopy, assign, trained_weights
from mindllm.train.step import ForwardBackward
from mindllm.weight_files import read_hugging_face, write_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hugging_face import LLAMAS, save_llama  # noqa: E402

LENGTH = 48
TOKENS = np.random.default_rng(0).integers(0, 97, (2, LENGTH + 1)).astype(np.int32)


class Logits(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, input_ids):
        return P.reshape(self.model.logits(self.model.model(input_ids)), (*input_ids.shape, -1))


def loaded(directory):
    config = read_model_config(directory).model_copy(update={"seq_length": LENGTH})
    model = build_model(config)
    assign(trained_weights(model), read_hugging_face(directory, config))
    return model, config


@pytest.mark.parametrize("name", LLAMAS)
def test_a_directory_computes_what_its_llama_computes(name, tmp_path):
    llama = save_llama(tmp_path / "theirs", std=0.1, **LLAMAS[name])
    llama.get_input_embeddings().padding_idx = None
    model, _ = loaded(tmp_path / "theirs")
    inputs, labels = TOKENS[:, :-1], TOKENS[:, 1:]
    output = llama(torch.tensor(inputs, dtype=torch.long)).logits
    logits = Logits(model)(Tensor(inputs)).asnumpy()
    np.testing.assert_allclose(logits, output.detach().numpy(), atol=1e-4)

    loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), torch.tensor(labels, dtype=torch.long).flatten())
    loss.backward()
    weights = ms.ParameterTuple(model.trainable_params())
    mask = np.ones_like(inputs, np.float32)
    summed, tokens, gradients = ForwardBackward(model, weights)(*map(Tensor, (inputs, labels, mask)), Tensor(1.0))
    assert float(summed / tokens) == pytest.approx(loss.item(), abs=1e-4)
    expected = {key: value.grad.numpy() for key, value in llama.named_parameters()}
    for weight, gradient in zip(weights, gradients, strict=True):
        wanted = expected[HUGGING_FACE.theirs(weight.name)]
        error = np.abs(gradient.asnumpy() - wanted).max()
        assert error <= 1e-4 * np.abs(wanted).max(), weight.name


@pytest.mark.parametrize("name", LLAMAS)
def test_transformers_writes_the_same_text_with_what_is_exported(name, tmp_path):
    save_llama(tmp_path / "theirs", **LLAMAS[name])
    model, config = loaded(tmp_path / "theirs")
    weights = {key: HostCopy(item) for key, item in trained_weights(model).items()}
    write_weights(tmp_path / "ours", config, weights, max_shard_bytes=30_000)
    llama = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    prompt = TOKENS[0, :11].tolist()
    (result,) = Generator(model, config).generate([prompt], GenerationConfig(max_new_tokens=24))
    with torch.inference_mode():
        theirs = llama.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert result.tokens == theirs.tolist()
    assert len(set(result.tokens)) > 3, "the model says more than one thing, or nothing is tested"
