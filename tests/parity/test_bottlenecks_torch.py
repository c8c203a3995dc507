"""Five steps of bottlenecks (Houlsby et al., 2019) beside a small reference in PyTorch, around the public Llama."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hugging_face import hugging_face_llama  # noqa: E402
from test_llama_torch import random_batch, torch_loss  # noqa: E402
from test_peft_training import FIELDS, OPTIMIZER, RATE, STEPS, close  # noqa: E402

from mindllm.config import ModelConfig  # noqa: E402
from mindllm.finetune.transform import build_tuned_model  # noqa: E402
from mindllm.models import build_model  # noqa: E402
from mindllm.models.weights import assign, model_weights, trained_weights  # noqa: E402
from mindllm.train.optimizers.adamw import AdamW  # noqa: E402
from mindllm.train.step import TrainStep  # noqa: E402

THEIRS = {"attention": "self_attn", "feed_forward": "mlp"}


class Reference(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.values = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.tensor(item)) for name, item in values.items()}
        )

    def forward(self, h):
        narrow = torch.nn.functional.linear(h, self.values["down_weight"], self.values["down_bias"])
        narrow = torch.nn.functional.gelu(narrow, approximate="tanh")
        return h + torch.nn.functional.linear(narrow, self.values["up_weight"], self.values["up_bias"])


def inserted(theirs, trained, layers):
    """References behind the parts of every layer of ``theirs``, by our names of their weights."""
    found = {}
    for number in range(layers):
        for part, module in THEIRS.items():
            path = f"model.layers.{number}.{part}_adapter."
            reference = Reference(
                {
                    name.removeprefix(path).replace(".", "_"): item
                    for name, item in trained.items()
                    if name.startswith(path)
                }
            )
            found |= {path + name.replace("_", "."): item for name, item in reference.values.items()}
            getattr(theirs.model.layers[number], module).register_forward_hook(
                lambda module, inputs, output, reference=reference: (
                    (reference(output[0]), *output[1:]) if isinstance(output, tuple) else reference(output)
                )
            )
    return found


def test_five_steps_are_those_of_the_reference():
    config = ModelConfig.model_validate({**FIELDS, "pet_config": {"pet_type": "bottleneck", "adapter_length": 6}})
    random, model = np.random.default_rng(0), build_tuned_model(config)
    start = {
        name: random.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in config.architecture.weight_shapes().items()
    }
    assign(model_weights(model), start)
    trained = {name: start[name] for name in trained_weights(model)}
    assert trained.keys() == config.architecture.trained_shapes().keys()
    plain = build_model(config.base)
    assign(trained_weights(plain), {name: start[name] for name in trained_weights(plain)})
    theirs = hugging_face_llama(plain, config).requires_grad_(False)
    beside = inserted(theirs, trained, config.num_layers)
    options = {"lr": RATE, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "weight_decay": 0.0}
    opponent = torch.optim.AdamW(beside.values(), **options)
    optimizer = AdamW(list(trained_weights(model).values()), OPTIMIZER, pet=config.pet_config)
    step = TrainStep(model, optimizer, None).set_train()
    for count in range(STEPS):
        inputs, labels, mask = random_batch(count)
        loss, *_ = step(*map(Tensor, (inputs, labels, mask)), Tensor(RATE, ms.float32), Tensor(1.0, ms.float32))
        wanted = torch_loss(theirs, inputs, labels, mask)
        assert float(loss) == pytest.approx(wanted.item(), abs=2e-5), count
        wanted.backward()
        if count == 0:
            moments = {item.name: item.asnumpy() / (1 - OPTIMIZER.betas[0]) for item in optimizer.moments1}
            close({name: moments[f"adam_m.{name}"] for name in trained}, {n: w.grad.numpy() for n, w in beside.items()})
        opponent.step()
        opponent.zero_grad()
    ours = {name: item.asnumpy() for name, item in trained_weights(model).items()}
    close(ours, {name: item.detach().numpy() for name, item in beside.items()})
