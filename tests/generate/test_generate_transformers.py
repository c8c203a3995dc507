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


def test_log_probabilities_equal():
    config = tiny_config(n_kv_heads=2)
    model, prompt = tiny_model(config), [5, 17, 3, 60, 22]
    limits = {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "output_logprobs": True}
    for keys in ({"output_logprobs": True}, limits):
        (result,) = Generator(model, config).generate([prompt], options(12, **keys), seed=1)
        with torch.inference_mode():
            logits = hugging_face_llama(model, config)(torch.tensor([prompt + result.tokens])).logits[0]
        expected = torch.log_softmax(logits, -1)[range(4, 16), result.tokens].tolist()
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_greedy_text_with_a_repetition_penalty_equals():
    config = tiny_config(n_kv_heads=2)
    model, prompt = tiny_model(config), [5, 17, 3, 60, 22]
    with torch.inference_mode():
        expected = hugging_face_llama(model, config).generate(
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, repetition_penalty=1.4
        )
    (result,) = Generator(model, config).generate([prompt], options(30, repetition_penalty=1.4))
    assert result.tokens == expected[0, 5:].tolist()
    assert result.tokens != Generator(model, config).generate([prompt], options(30))[0].tokens
