"""How a prompt begins and where a text ends: the configuration's tokens, else the tokenizer's as it uses them."""

from types import SimpleNamespace

import pytest
from tiny import options, tiny_config, tiny_model

from mindllm.data.chat import instruction
from mindllm.data.chat.instruction import end_ids
from mindllm.generate.generator import Generator
from mindllm.generate.prompts import encode_prompt


def tokenizer(**changes):
    told = {"eos_id": 2, "end_ids": (), "prefix_ids": (1,), "encode": lambda text: [7, 8]}
    return SimpleNamespace(**told | changes)


@pytest.mark.parametrize(
    ("given", "prefix", "expected"),
    [(None, (1,), [1, 7, 8]), (None, (), [7, 8]), (None, (3, 4), [3, 4, 7, 8]), (5, (1,), [5, 7, 8])],
)
def test_a_prompt_begins_as_the_tokenizer_would_begin_it(given, prefix, expected):
    assert encode_prompt("text", tiny_config(bos_token_id=given), tokenizer(prefix_ids=prefix)) == expected


@pytest.mark.parametrize(("own", "expected"), [((), (2, 7)), ((4,), (4, 2, 7)), ((7, 5), (7, 5, 2))])
def test_ends_of_a_text_are_those_of_model_tokenizer_and_template(own, expected, monkeypatch):
    monkeypatch.setattr(instruction, "chat_template_of", lambda tokenizer, given: None)
    monkeypatch.setattr(instruction, "answer_end_ids", lambda template, tokenizer: (7,))
    assert end_ids(own, tokenizer()) == expected
    assert set(end_ids(own, tokenizer(end_ids=(5, 9)))) == {*expected, 5, 9}
    assert end_ids(own, None) == own


def test_any_of_several_ends_a_text():
    config = tiny_config()
    model, prompt = tiny_model(config), [5, 17, 3]
    (free,) = Generator(model, config).generate([prompt], options(24))
    end = next(token for token in free.tokens if token != free.tokens[0])
    several = config.model_copy(update={"eos_token_id": (config.vocab_size - 1, end)})
    (ended,) = Generator(model, several).generate([prompt], options(24))
    assert ended.tokens == free.tokens[: free.tokens.index(end)]
    assert ended.finish_reason == "eos"
