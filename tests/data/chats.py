"""Templates in the manner of public models, and a tokenizer that has their special tokens."""

import json
from types import SimpleNamespace

from mindllm.data.chat.template import chat_template_of
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.data.tokenizers.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = (  # no header of its own for the assistant, and a refusal of turns out of order
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # shortens earlier answers, as templates of reasoning models do with thoughts
    "{% for message in messages %}{% if message.role == 'assistant' and not loop.last %}<|im_start|>A: {{ message.content[:3] }}"
    "{% else %}<|im_start|>{{ message.role }}: {{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
TEXTS = [f"What is {i} plus {i % 9}? It is {i + i % 9}.\nThank you. été {i}\n" for i in range(300)]


def template_of(directory, given="", own=""):
    """The chat template of a directory whose tokenizer has no special tokens."""
    tokenizer = SimpleNamespace(
        path=directory / "tokenizer.json", special_tokens={}, special_names=[], chat_template=own
    )
    return chat_template_of(tokenizer, given)


def chat_tokenizer(directory, template=None, vocab_size=400, **special):
    """A byte-level tokenizer in ``directory`` with the special tokens of SPECIAL, and a template of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_byte_level_bpe(TEXTS, vocab_size, SPECIAL), directory / "tokenizer.json")
    config = {"eos_token": "<|endoftext|>", "bos_token": "<s>", **special}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory / "tokenizer.json")
