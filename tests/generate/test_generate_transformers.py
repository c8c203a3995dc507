"""The same weights in Hugging Face's Llama write the same text."""

import numpy as np
import pytest
from tiny import SHAPES, VOCABULARY, options, tiny_config, tiny_model

from mindllm.generate.generator import Generator

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hugging_face import ROPE_SCALINGS, hugging_face_llama  # noqa: E402


def both(config, scaling=None, count=40):
    model = tiny_model(config)
    prompts = [np.random.default_rng(1).integers(0, VOCABULARY, length).tolist() for length in (9, 17)]
    llama = hugging_face_llama(model, config, scaling)
    with torch.inference_mode():
        expected = [
            llama.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    return [result.tokens for result in Generator(model, config).generate(prompts, options(count))], expected


@pytest.mark.parametrize(("shape", "scaling"), [("multi-head", None), ("grouped", "linear"), ("tied", "llama3")])
def test_greedy_text_equals(shape, scaling):
    ours, theirs = ROPE_SCALINGS[scaling] if scaling else (None, None)
    written, expected = both(tiny_config(**SHAPES[shape], rope_scaling=ours), theirs)
    assert written == expected
