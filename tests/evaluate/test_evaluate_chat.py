"""Conversations become the same text as in the harness's own class for Hugging Face models."""

from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")

import transformers
from tiny_model import LENGTH, write_tokenizer

from mindllm.data import load_tokenizer
from mindllm.evaluate.model import EvaluatedModel

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "1+5?"},
]
BEGUN = [*ASKED, {"role": "assistant", "content": "The answer is "}]


@pytest.mark.parametrize(("messages", "prompt"), [(ASKED, True), (BEGUN, False), (BEGUN[2:], False)])
def test_a_conversation_is_the_text_of_the_harness(messages, prompt, tmp_path):
    write_tokenizer(tmp_path, TEMPLATE)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    model = EvaluatedModel(SimpleNamespace(tokenizer=tokenizer, max_length=LENGTH, eos_ids=[96]))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, continue_final_message=not prompt
    )
    assert model.chat_template(True) == TEMPLATE
    assert model.apply_chat_template(messages, add_generation_prompt=prompt) == theirs
