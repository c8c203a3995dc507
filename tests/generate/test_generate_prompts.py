"""How a prompt begins and where a text ends: the configuration's tokens, else the tokenizer's as it uses them."""

from types import SimpleNamespace

import pytest
from tiny import options, tiny_config, tiny_model

from mindllm.generate.generator import Generator
from mindllm.generate.prompts import encode_prompt, eos_ids


def tokenizer(**changes):
    return SimpleNamespace(**{"bos_id": 1, "eos_id": 2, "adds_bos": True, "encode": lambda text: [7, 8]} | changes)


@pytest.mark.parametrize(
    ("given", "adds_bos", "expected"), [(None, True, [1, 7, 8]), (None, False, [7, 8]), (5, False, [5, 7, 8])]
)
def test_a_prompt_begins_as_the_tokenizer_would_begin_it(given, adds_bos, expected):
    assert encode_prompt("text", tiny_config(bos_token_id=given), tokenizer(adds_bos=adds_bos)) == expected


@pytest.mark.parametrize(("given", "expected"), [(None, (2,)), (4, (4,)), ([4, 5], (4, 5))])
def test_ends_of_a_text(given, expected):
    assert eos_ids(tiny_config(eos_token_id=given), tokenizer()) == expected
    assert eos_ids(tiny_config(), None) == ()


def test_any_of_several_ends_a_text():
    config = tiny_config()
    model, prompt = tiny_model(config), [5, 17, 3]
    (free,) = Generator(model, config).generate([prompt], options(24))
    end = next(token for token in free.tokens if token != free.tokens[0])
    several = config.model_copy(update={"eos_token_id": (config.vocab_size - 1, end)})
    (ended,) = Generator(model, several).generate([prompt], options(24))
    assert ended.tokens == free.tokens[: free.tokens.index(end)]
    assert ended.finish_reason == "eos"
