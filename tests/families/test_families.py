"""Every family: what it computes beside its published implementation, its files both ways, its text, its operators sharded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore import ops as P

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from opponents import NAMES, TINY, load, opponent  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

from mindllm.config import read_model_config  # noqa: E402
from mindllm.config.generation import GenerationConfig  # noqa: E402
from mindllm.config.parallel import ParallelConfig  # noqa: E402
from mindllm.families import FAMILIES, family_of  # noqa: E402
from mindllm.generate.generator import Generator  # noqa: E402
from mindllm.models import CausalLM, Kernels, build_model  # noqa: E402
from mindllm.models.weights import HostCopy, assign, trained_weights  # noqa: E402
from mindllm.parallel.layout import Mesh  # noqa: E402
from mindllm.parallel.operators import operators  # noqa: E402
from mindllm.parallel.sharding import FOLLOWERS, apply_sharding, sharding_table  # noqa: E402
from mindllm.train.step import ForwardBackward  # noqa: E402
from mindllm.weight_files import (  # noqa: E402
    read_hugging_face,
    write_weights,
)
from mindllm.weight_files.family_weights import FamilyWeights  # noqa: E402

LENGTH = 24
TOKENS = np.random.default_rng(0).integers(3, 97, (2, LENGTH + 1)).astype(np.int32)
TOLERANCE = 1e-4
SAYS_ONE_THING = {"glm4"}  # with these weights; its logits are compared as those of the others


class Logits(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, input_ids):
        decoded = self.model.model(input_ids)
        hidden = decoded[0] if self.model.model.adds_to_loss else decoded
        return P.reshape(self.model.logits(hidden), (*input_ids.shape, -1))


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    """A tiny model of the family on both sides, with the same weights."""
    other = opponent(request.param, tmp_path_factory.mktemp("family") / "theirs")
    config = read_model_config(other.directory).model_copy(update={"seq_length": LENGTH, "eos_token_id": None})
    model = build_model(config)
    assign(trained_weights(model), read_hugging_face(other.directory, config))
    return SimpleNamespace(other=other, config=config, model=model)


def test_logits_and_gradients_are_theirs(pair):
    inputs, labels = TOKENS[:, :-1], TOKENS[:, 1:]
    output = pair.other.logits(torch.tensor(inputs, dtype=torch.long))
    logits = Logits(pair.model)(Tensor(inputs)).asnumpy()
    np.testing.assert_allclose(logits, output.detach().numpy(), atol=TOLERANCE * max(1.0, np.abs(logits).max()))

    targets = torch.tensor(labels, dtype=torch.long).flatten()
    loss = torch.nn.functional.cross_entropy(output.float().flatten(0, 1), targets)
    loss.backward()
    weights = ms.ParameterTuple(pair.model.trainable_params())
    mask = np.ones_like(inputs, np.float32)
    summed, tokens, gradients = ForwardBackward(pair.model, weights)(*map(Tensor, (inputs, labels, mask)), Tensor(1.0))
    assert float(summed / tokens) == pytest.approx(loss.item(), abs=TOLERANCE)
    ours = {weight.name: item.asnumpy() for weight, item in zip(weights, gradients, strict=True)}
    theirs = pair.other.gradients()
    for name, mine in FamilyWeights(pair.config).write(ours).items():
        if name.endswith("e_score_correction_bias"):  # theirs is no parameter
            continue
        wanted = theirs[name].numpy()
        assert np.abs(np.asarray(mine) - wanted).max() <= TOLERANCE * max(np.abs(wanted).max(), 1e-2), name


def test_greedy_text_with_a_cache_is_theirs(pair):
    prompt = TOKENS[0, :11].tolist()
    (result,) = Generator(pair.model, pair.config, max_length=LENGTH).generate(
        [prompt], GenerationConfig(max_new_tokens=12, do_sample=False)
    )
    assert result.tokens == pair.other.greedy(prompt, 12)
    if pair.other.name not in SAYS_ONE_THING:
        assert len(set(result.tokens)) > 1, "the model says more than one thing, or little is tested"


def test_files_come_back_bit_equal_and_transformers_loads_them(pair, tmp_path):
    weights = {name: HostCopy(item) for name, item in trained_weights(pair.model).items()}
    write_weights(tmp_path / "ours", pair.config, weights)
    before, after = (
        load_file(pair.other.directory / "model.safetensors"),
        load_file(tmp_path / "ours/model.safetensors"),
    )
    assert set(after) == {name for name in before if "inv_freq" not in name}
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    again = read_model_config(tmp_path / "ours")
    assert again.architecture == pair.config.architecture
    if pair.other.name in TINY:
        tokens = torch.tensor(TOKENS[:, :-1], dtype=torch.long)
        with torch.inference_mode():
            np.testing.assert_array_equal(load(tmp_path / "ours")(tokens).logits, pair.other.logits(tokens))


@pytest.mark.parametrize("fused", [True, False])
def test_every_operator_is_sharded(pair, fused):
    kernels = Kernels(fused=fused, flash_attention=False, activation=ms.float16, operand=ms.float16)
    model = CausalLM(pair.config, kernels)
    parallel = ParallelConfig(use_seq_parallel=True, vocab_emb_dp=True, model_parallel=2)
    table = sharding_table(model, parallel)
    assert set(table) == {path for path, op in operators(model).items() if op.name not in FOLLOWERS}
    apply_sharding(model, table, Mesh(1, 2))


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_file_is_read_as_its_family(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY[name]))
    model = read_model_config(tmp_path)
    assert family_of(model).name == TINY[name]["model_type"]
    assert family_of(model).differs(model) == []


def test_every_family_is_tested():
    tested = {content["model_type"] for content in TINY.values()}
    assert {family.name for family in FAMILIES} - tested <= {
        "chatglm",
        "internlm",
        "internlm2",
        "baichuan",
        "qwen",
        "aquila",
        "telechat",
        "telechat3",
    }
