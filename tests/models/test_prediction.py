"""Layers that predict ahead beside PyTorch: loss, gradients, masks, files both ways; evaluation and text do without them."""

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402
from tiny_families import TINY  # noqa: E402
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # noqa: E402
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)

from mindllm.config import read_model_config  # noqa: E402
from mindllm.errors import UserError  # noqa: E402
from mindllm.generate.graphs.cache import CachedDecoder  # noqa: E402
from mindllm.models import Kernels, build_model  # noqa: E402
from mindllm.models.attention.sequence_order import balanced_order  # noqa: E402
from mindllm.models.causal_lm import for_evaluation  # noqa: E402
from mindllm.models.experts.expert_load import LOSS_PROBE  # noqa: E402
from mindllm.models.mtp import TokenShift  # noqa: E402
from mindllm.models.weights import HostCopy, assign, model_weights, trained_weights  # noqa: E402
from mindllm.train.callbacks.figures import mean_mtp_loss  # noqa: E402
from mindllm.train.step import ForwardBackward  # noqa: E402
from mindllm.weight_files import (  # noqa: E402
    read_hugging_face,
    write_weights,
)

LENGTH, DEPTHS, FACTOR = 12, 2, 0.4
GENERATOR = np.random.default_rng(0)
TEXT = GENERATOR.integers(3, 97, (2, LENGTH + 1)).astype(np.int32)
TOKENS, LABELS = TEXT[:, :-1], np.ascontiguousarray(TEXT[:, 1:])
MASK = np.ones((2, LENGTH), np.float32)
MASK[0, 5] = MASK[1, 0] = MASK[1, -1] = 0


class Predictor(torch.nn.Module):
    """Written after equations 21 to 25 of the report, with its files' order of what is joined."""

    def __init__(self, config, number):
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm, self.final = (DeepseekV3RMSNorm(width, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.block = DeepseekV3DecoderLayer(config, number)

    def forward(self, hidden, embedded, **block):
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        found = self.block(joined, **block)
        return self.final(found[0] if isinstance(found, tuple) else found)

    def tensors(self, at):
        named = {"final": "shared_head.norm", "block.": ""}
        for name, value in self.named_parameters():
            for ours, theirs in named.items():
                name = name.replace(ours, theirs, 1) if name.startswith(ours) else name
            yield f"{at}.{name}", value
        yield f"{at}.mlp.gate.e_score_correction_bias", self.block.mlp.gate.e_score_correction_bias


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A directory with ``DEPTHS`` layers that predict ahead, the loss of PyTorch, and its gradients by their names."""
    torch.manual_seed(0)
    content = {**TINY["deepseek_v3"], "rope_scaling": None}
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    layers = [Predictor(model.config, 2 + depth).eval() for depth in range(DEPTHS)]
    for layer in layers:
        layer.block.self_attn.config._attn_implementation = "eager"
    with torch.no_grad():
        for part in (model, *layers):
            for parameter in part.parameters():
                torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
            for name, buffer in part.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.3)
    loss = torch_loss(model, layers)
    loss.backward()
    directory = tmp_path_factory.mktemp("prediction") / "theirs"
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    gradients = {}
    for depth, layer in enumerate(layers):
        at = f"model.layers.{2 + depth}"
        for name, value in layer.tensors(at):
            tensors[name] = value.detach().numpy()
            if value.grad is not None:
                gradients[name] = value.grad.numpy()
        tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{at}.shared_head.head.weight"] = tensors["lm_head.weight"]
    gradients |= {name: item.grad.numpy() for name, item in model.named_parameters() if "experts" not in name}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, "num_nextn_predict_layers": DEPTHS}))
    return directory, float(loss.detach()), gradients


def torch_loss(model, layers):
    """Summed over tokens: that of the next token, and the mean over depths times the factor, the mask as far ahead."""
    tokens, labels, mask = torch.tensor(TOKENS).long(), torch.tensor(LABELS).long(), torch.tensor(MASK)
    hidden = model.model(tokens).last_hidden_state

    def summed(states, labels, mask):
        losses = torch.nn.functional.cross_entropy(
            model.lm_head(states).flatten(0, 1), labels.flatten(), reduction="none"
        )
        return (losses * mask.flatten()).sum()

    total = summed(hidden, labels, mask)
    causal = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    positions = torch.arange(LENGTH)[None]
    for depth, layer in enumerate(layers, start=1):
        # Only positions that have such a token at all: nothing beyond the end can have been read.
        embedded = model.model.embed_tokens(torch.roll(tokens, -depth, 1))
        hidden = layer(
            hidden,
            embedded,
            attention_mask=causal,
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(hidden, positions),
        )
        kept = slice(0, LENGTH - depth)
        total = total + FACTOR / DEPTHS * summed(hidden[:, kept], labels[:, depth:], mask[:, depth:])
    return total


@pytest.fixture(scope="module")
def ours(pair):
    config = read_model_config(pair[0])
    config = config.model_copy(update={"seq_length": LENGTH, "eos_token_id": None, "mtp_loss_factor": FACTOR})
    model = build_model(config)
    assign(model_weights(model), read_hugging_face(pair[0], config))
    return config, model


def columns():
    return Tensor(TOKENS), Tensor(LABELS), Tensor(MASK)


def test_loss_and_gradients_are_those_of_the_report(pair, ours):
    _, wanted, theirs = pair
    model = ours[1]
    weights = ms.ParameterTuple(list(trained_weights(model).values()))
    counters = [item for item in model.trainable_params() if LOSS_PROBE in item.name]
    step = ForwardBackward(model, ms.ParameterTuple([*weights, *counters]), positions=1)
    loss, tokens, gradients = step(*columns(), Tensor(1.0, ms.float32))
    assert float(loss.asnumpy()) == pytest.approx(wanted, rel=1e-5)
    assert tokens.asnumpy() == MASK.sum()
    found = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients, strict=False)}
    by_depth = [gradient.asnumpy() for gradient in gradients[len(weights) :]]
    assert [tokens for _, tokens in by_depth] == [MASK[:, depth:].sum() for depth in (1, 2)]
    plain = float(for_evaluation(model)(*columns()).asnumpy())
    assert plain + FACTOR / DEPTHS * sum(summed for summed, _ in by_depth) == pytest.approx(wanted, rel=1e-5)
    counted = {f"load.{item.name}": values for item, values in zip(counters, by_depth, strict=True)}
    assert mean_mtp_loss(counted) == pytest.approx(np.mean([summed / tokens for summed, tokens in by_depth]))
    assert mean_mtp_loss({name: np.zeros(2) for name in counted}) is None
    alike = [f"model.layers.{2 + n}.{name}.weight" for n in range(DEPTHS) for name in ("enorm", "hnorm", "eh_proj")]
    compared = {name: name for name in alike}
    for depth in range(DEPTHS):
        compared[f"model.layers.{2 + depth}.final_norm.weight"] = f"model.layers.{2 + depth}.shared_head.norm.weight"
        compared[f"model.layers.{2 + depth}.attention.wo.weight"] = f"model.layers.{2 + depth}.self_attn.o_proj.weight"
        compared[f"model.layers.{2 + depth}.feed_forward.router.weight"] = f"model.layers.{2 + depth}.mlp.gate.weight"
    compared["model.tok_embeddings.embedding_weight"] = "model.embed_tokens.weight"
    compared["lm_head.weight"] = "lm_head.weight"
    compared["model.norm_out.weight"] = "model.norm.weight"
    compared["model.layers.0.attention.wo.weight"] = "model.layers.0.self_attn.o_proj.weight"
    for name, their_name in compared.items():
        scale = np.abs(theirs[their_name]).max()
        assert scale > 0, their_name
        np.testing.assert_allclose(found[name], theirs[their_name], atol=1e-4 * scale, err_msg=name)


def test_weights_are_those_the_architecture_counts(ours):
    config, model = ours
    assert {
        name: tuple(item.shape) for name, item in model_weights(model).items()
    } == config.architecture.weight_shapes()


def test_the_mask_ends_with_the_sequence_and_with_documents():
    ahead = TokenShift(2, np.arange(6), documents=True)
    mask = Tensor(np.array([[1, 1, 1, 1, 0, 1]], np.float32))
    np.testing.assert_array_equal(ahead(Tensor(np.arange(6, dtype=np.int32)[None])).asnumpy()[0, :4], [2, 3, 4, 5])
    np.testing.assert_array_equal(ahead.mask(mask, None).asnumpy(), [[1, 1, 0, 1, 0, 0]])
    starts = Tensor(np.array([[0, 0, 0, 3, 3, 3]], np.int32))
    np.testing.assert_array_equal(ahead.mask(mask, starts).asnumpy(), [[1, 0, 0, 1, 0, 0]])


def test_evaluation_and_text_do_without_them(ours):
    config, model = ours
    plain_config = config.model_copy(update={"num_nextn_predict_layers": 0})
    plain = build_model(plain_config)
    weights = {name: HostCopy(item) for name, item in model_weights(model).items()}
    assign(model_weights(plain), weights)
    wanted = plain(*columns()).asnumpy()
    assert for_evaluation(model)(*columns()).asnumpy() == pytest.approx(wanted, rel=1e-6)
    assert model(*columns()).asnumpy() > wanted
    kernels = Kernels.choose(config, "CPU")
    assert len(CachedDecoder(model, config, kernels, 1, LENGTH).layers) == config.num_layers


def test_files_hold_them_with_what_they_share(pair, ours, tmp_path, caplog):
    config, model = ours
    weights = {name: HostCopy(item) for name, item in model_weights(model).items()}
    directory = write_weights(tmp_path / "ours", config, weights)
    theirs, written = load_file(pair[0] / "model.safetensors"), load_file(directory / "model.safetensors")
    ahead = {name for name in written if name.startswith(("model.layers.2.", "model.layers.3."))}
    assert {
        f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head", "shared_head.norm")
    } <= ahead
    for name in ahead - {name for name in ahead if ".experts." in name}:
        np.testing.assert_array_equal(written[name], theirs[name], err_msg=name)
    assert read_model_config(directory).num_nextn_predict_layers == DEPTHS
    assert set(read_hugging_face(directory, config)) == set(config.architecture.weight_shapes())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    np.testing.assert_array_equal(loaded.lm_head.weight.detach().numpy(), written["lm_head.weight"])
    fewer = config.model_copy(update={"num_nextn_predict_layers": 1})
    with caplog.at_level("INFO"):
        assert set(read_hugging_face(directory, fewer)) == set(fewer.architecture.weight_shapes())
    assert "prediction layers from 3 on are not read" in caplog.text
    more = config.model_copy(update={"num_nextn_predict_layers": 3})
    with pytest.raises(UserError, match="does not have prediction layer 4"):
        read_hugging_face(directory, more)


def test_tokens_to_come_are_found_where_they_stand():
    """Of a sequence that two devices share in balanced halves."""
    order = balanced_order(8, 2)
    ahead = TokenShift(2, order, documents=False)
    tokens = Tensor(order.reshape(1, 8) * 10)
    assert ahead(tokens).asnumpy().tolist() == [[min(position + 2, 7) * 10 for position in order]]
    mask = ahead.mask(Tensor(np.ones((1, 8), np.float32)), None).asnumpy()
    assert mask.tolist() == [[float(position + 2 < 8) for position in order]]
