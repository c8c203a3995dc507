"""The tokenizer in a GGUF file gives every text the ids of the tokenizer it was made of."""

import io
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindllm.data.chat.template import chat_template_of
from mindllm.data.tokenizers.files import copy_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import train_byte_level_bpe
from mindllm.data.tokenizers.tokenizer import load_tokenizer
from mindllm.data.tokenizers.vocabularies import PRE_TOKENIZERS
from mindllm.errors import UserError

gguf = pytest.importorskip("gguf")

from tiny_gguf import add_tensor, finish  # noqa: E402
from tokenizers import Regex, Tokenizer, pre_tokenizers  # noqa: E402

TEXTS = [Path(module.__file__).read_text(encoding="utf-8") for module in (json.decoder, textwrap)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(
        st.sampled_from(
            [
                "word",
                " ",
                "  ",
                "\n",
                "\n\n",
                "\t",
                "12",
                "345",
                "it's",
                "I'LL",
                "été",
                "中文",
                "，",
                "def f(x):",
                "<|im_end|>",
                "🙂",
                "e\u0301",
                "A",
                "zB",
            ]
        )
    ).map("".join),
)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def write(path, tokens, types, architecture="llama", **keys):
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in keys.items():
        getattr(writer, f"add_{name}")(value)
    add_tensor(writer, "token_embd.weight", np.ones((len(tokens), 2), np.float32), "F32")
    finish(writer)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A byte-level tokenizer, and its vocabulary and merges as llama.cpp's converter writes them, with rows that pad."""
    tokenizer = train_byte_level_bpe(TEXTS, 600, SPECIAL)
    content = json.loads(tokenizer.to_str())
    names = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]

    def made(pre, **keys):
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        tokens, types = [*names, "[PAD600]", "[PAD601]"], [3] * 3 + [1] * (len(names) - 3) + [5, 5]
        named = {"tokenizer_model": "gpt2", "tokenizer_pre": pre, "token_merges": merges}
        return write(path, tokens, types, **named, **keys)

    return tokenizer, made


# How the tokenizer.json of each model cuts texts, as it stands there.
HEAD = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
TAIL = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
LLAMA_3, QWEN_2 = f"{HEAD}\\p{{N}}{{1,3}}{TAIL}", f"{HEAD}\\p{{N}}{TAIL}"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
ORIGINALS = {
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_2), "isolated"), BYTES]),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "gpt-2": WORDS,
    "deepseek-coder": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
            pre_tokenizers.Split(Regex("\\s?\\p{L}+"), "isolated"),
            pre_tokenizers.Split(Regex("\\s?\\p{P}+"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            BYTES,
        ]
    ),
}
TOKENIZERS = {}


@pytest.fixture(params=ORIGINALS)
def both(request, trained):
    if request.param not in TOKENIZERS:
        tokenizer, made = trained
        original = Tokenizer.from_str(tokenizer.to_str())
        original.pre_tokenizer = ORIGINALS[request.param]
        original.encode_special_tokens = True
        TOKENIZERS[request.param] = (load_tokenizer(made(request.param)), original)
    return TOKENIZERS[request.param]


@settings(max_examples=150, deadline=None)
@given(text=CORPUS)
@example("  12  345 it's I'LL\n\n 中文，été 🙂\t<|im_end|>")
def check(ours, original, text):
    assert ours.encode(text) == original.encode(text, add_special_tokens=False).ids


def test_byte_level_ids_are_those_of_the_original(both):
    ours, original = both
    normal = (lambda text: text) if ours.path.read_bytes().find(b"qwen2") < 0 else None
    if normal is None:  # Qwen's normalises, too
        from tokenizers import normalizers

        original.normalizer = normalizers.NFC()
    check(ours, original)


def test_names_of_special_tokens_mean_them_where_they_are_marked(trained):
    _, made = trained
    tokenizer = load_tokenizer(
        made("smollm", bos_token_id=1, eos_token_id=2, add_bos_token=True, chat_template=TEMPLATE)
    )
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos, tokenizer.prefix_ids) == (1, 2, True, (1,))
    assert tokenizer.vocab_size == 600, "rows that pad the embedding are no tokens"
    assert list(tokenizer.special_names) == SPECIAL
    assert tokenizer.encode_marked("<|im_start|>a<|im_end|>")[0][::2] == [1, 2]
    assert 2 not in tokenizer.encode("<|im_end|>"), "a word that spells a special token stays words"
    assert chat_template_of(tokenizer).source == TEMPLATE


def test_the_chat_of_an_exported_tokenizer_is_that_of_the_file(trained, tmp_path):
    _, made = trained
    ours = load_tokenizer(made("smollm", bos_token_id=1, eos_token_id=2, chat_template=TEMPLATE))
    copy_tokenizer(ours, tmp_path)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "return  12"}]
    text = "<|im_start|>return  12<|im_end|>"
    assert theirs.apply_chat_template(chat, tokenize=False) == text
    assert theirs(text).input_ids == ours.encode_marked(text)[0]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


def test_the_template_for_tools_is_read_and_exported(trained, tmp_path):
    _, made = trained
    texts = {"default": TEMPLATE, "tool_use": "{{ tools }}" + TEMPLATE}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    copy_tokenizer(load_tokenizer(made("smollm", eos_token_id=2, chat_template=named)), tmp_path)
    template = chat_template_of(load_tokenizer(tmp_path))
    assert (template.source, template.for_tools.source) == tuple(texts.values())


def test_what_lies_beside_the_file_belongs_to_others(trained):
    _, made = trained
    path = made("smollm", chat_template=TEMPLATE, eos_token_id=2)
    (path.parent / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "chat_template": "other"}')
    tokenizer = load_tokenizer(path)
    assert (tokenizer.eos_id, chat_template_of(tokenizer).source) == (2, TEMPLATE)


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_ids_are_those_of_sentencepiece(prefixed, tmp_path):
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(TEXTS).splitlines()), model_writer=model, vocab_size=700, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefixed, user_defined_symbols=["<mark>"], minloglevel=2,
    )  # fmt: skip
    original = SentencePieceProcessor()
    original.LoadFromSerializedProto(model.getvalue())
    ids = range(original.vocab_size())
    kinds = ((original.IsUnknown, 2), (original.IsControl, 3), (original.IsUnused, 5), (original.IsByte, 6))
    types = [next((kind for test, kind in kinds if test(id)), 1) for id in ids]
    types[original.piece_to_id("<mark>")] = 4
    path = write(
        tmp_path / "model.gguf", [original.id_to_piece(id) for id in ids], types,
        tokenizer_model="llama", token_scores=[original.get_score(id) for id in ids], bos_token_id=1, eos_token_id=2,
        add_space_prefix=prefixed,
    )  # fmt: skip
    ours = load_tokenizer(path)
    assert (ours.bos_id, ours.eos_id, ours.adds_bos, ours.special_names) == (1, 2, True, ["<unk>", "<s>", "</s>"])

    @settings(max_examples=150, deadline=None)
    @given(text=st.text(st.characters(exclude_characters="\0▁", exclude_categories=["Cs"])) | CORPUS)
    @example("  return [x + 42]  # été €\n\n中文")
    def same(text):
        if text:  # nothing stays nothing in both
            assert ours.encode(text) == original.encode(text)
            assert ours.decode(ours.encode(text)) == text

    same()
    copy_tokenizer(ours, tmp_path)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    for text in ("  return [x + 42]", "été €\n\n中文", "a"):
        assert theirs(text).input_ids == [1, *original.encode(text)], "a text begins as the file says"
    apart = [*original.encode("b c"), original.piece_to_id("<mark>"), *original.encode("a")]
    assert ours.encode("b c<mark>a") == apart, "as llama.cpp: what is between added tokens is a text of its own"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tokenizer_model": "bert"}, "tokenizer.ggml.model: not read (value bert); read are gpt2, llama"),
        (
            {"tokenizer_model": "gpt2", "tokenizer_pre": "viking"},
            "tokenizer.ggml.pre: how this tokenizer cuts texts is not known",
        ),
        ({"tokenizer_model": "gpt2"}, "is not known (value none)"),
        (
            {"tokenizer_model": "gpt2", "tokenizer_pre": "qwen2", "token_merges": ["a c"]},
            "not a merge of its tokens (a c)",
        ),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.scores: must have an entry for each of the 3 tokens"),
    ],
)
def test_what_is_not_known_is_one_line(keys, said, tmp_path):
    path = write(tmp_path / "model.gguf", ["a", "b", "ab"], [1, 1, 1], **keys)
    with pytest.raises(UserError) as refused:
        load_tokenizer(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_pattern_is_one_that_the_library_takes(trained):
    _, made = trained
    for pre in PRE_TOKENIZERS:
        tokenizer = load_tokenizer(made(pre))
        text = "Hello WORLD 12 345,  中文!\n\n\tcafé d'été"
        assert tokenizer.decode(tokenizer.encode(text)) == text, pre
