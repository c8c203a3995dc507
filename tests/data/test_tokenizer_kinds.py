"""Tokenizers in the files that families ship, and what their code would add: ids as public programs give them, mistakes named."""

import base64
import json
import random
import unicodedata
from types import SimpleNamespace

import pytest
import sentencepiece
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from mindllm.data import load_tokenizer
from mindllm.data.chat.conversations import Conversation
from mindllm.data.chat.instruction import encode_chat, end_ids
from mindllm.data.chat.template import chat_template_of
from mindllm.data.tokenizers.files import copy_tokenizer
from mindllm.data.tokenizers.special_tokens import CL100K, KNOWN, QWEN
from mindllm.data.tokenizers.vocabularies import byte_characters
from mindllm.errors import UserError
from mindllm.generate.prompts import encode_prompt

LETTERS = "aab bé日本語 \n\t'st ſ1 2३ .,!ab"
CHAT = ({"role": "user", "content": "ab é"}, {"role": "assistant", "content": "ba"}, {"role": "user", "content": "a"})
NO_CONFIG = SimpleNamespace(bos_token_id=None, eos_token_ids=())


def some_texts(count, seed=0):
    """Texts of few letters, where merges compete, of many, and of one repeated."""
    draw = random.Random(seed)
    planes = ((32, 127), (0x80, 0x3000), (0x3000, 0xD800), (0x10000, 0x20000))

    def text():
        kind, length = draw.random(), draw.randrange(1, 40)
        if kind < 0.3:
            return "".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(length))
        return "".join(draw.choice(LETTERS if kind < 0.8 else "ab") for _ in range(length))

    return [text() for _ in range(count)]


@pytest.fixture(scope="module")
def byte_level():
    """A trained byte-level BPE: {token in GPT-2's spelling: id}, merges."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(some_texts(2000, seed=1), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], model["merges"]


def say(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def tiktoken_ranks(byte_level):
    bytes_of = {character: byte for byte, character in byte_characters().items()}
    ordered = sorted(byte_level[0], key=lambda token: (len(token) > 1, byte_level[0][token]))
    return {bytes(bytes_of[character] for character in token): rank for rank, token in enumerate(ordered)}


def write_tiktoken(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))


@pytest.fixture
def qwen(tmp_path, byte_level):
    say(
        tmp_path / "qwen",
        tokenizer_config={"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["t.T", None]}},
    )
    write_tiktoken(tmp_path / "qwen" / "qwen.tiktoken", tiktoken_ranks(byte_level))
    return tmp_path / "qwen"


def test_qwens_file_gives_the_ids_of_tiktoken(qwen, byte_level):
    tokenizer, ranks = load_tokenizer(qwen), tiktoken_ranks(byte_level)
    special = {name: len(ranks) + index for index, name in enumerate(KNOWN["QWenTokenizer"].appended)}
    public = tiktoken.Encoding("qwen", pat_str=QWEN, mergeable_ranks=ranks, special_tokens=special)
    for text in some_texts(2000):
        normal = unicodedata.normalize("NFC", text)
        ids = tokenizer.encode(text)
        assert ids == public.encode_ordinary(normal), repr(text)
        assert tokenizer.decode(ids) == normal
    marked = "<|im_start|>user\nab<|im_end|>"
    assert tokenizer.encode_marked(marked)[0] == public.encode(marked, allowed_special="all")
    assert tokenizer.encode(marked) == public.encode_ordinary(marked), "in a text they are words"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (special["<|endoftext|>"], public.n_vocab)
    assert end_ids((), tokenizer) == (special["<|endoftext|>"], special["<|im_end|>"])


def test_qwens_chat_is_what_its_code_writes(qwen):
    text = chat_template_of(load_tokenizer(qwen)).render_prompt(Conversation(CHAT), "chat").text
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nab é<|im_end|>\n<|im_start|>assistant\n"
        "ba<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    own = ({"role": "system", "content": "S"}, *CHAT[:2])
    chat = chat_template_of(load_tokenizer(qwen)).render(Conversation(own), "chat")
    assert chat.text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n")
    assert [chat.text[first:last] for first, last in chat.spans] == ["ba<|im_end|>"]


def test_qwens_tokenizer_is_exported_as_one_that_needs_no_code(qwen, tmp_path):
    tokenizer = load_tokenizer(qwen)
    (tmp_path / "out").mkdir()
    copy_tokenizer(tokenizer, tmp_path / "out")
    public = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    for text in some_texts(200, seed=2):
        assert public(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    text = chat_template_of(tokenizer).render_prompt(Conversation(CHAT), "chat").text
    assert public.apply_chat_template(list(CHAT), tokenize=False, add_generation_prompt=True) == text
    assert load_tokenizer(tmp_path / "out").fingerprint == tokenizer.fingerprint


def test_glm_4s_tokenizer_model_is_a_tiktoken_file(tmp_path, byte_level):
    ranks = tiktoken_ranks(byte_level)
    say(tmp_path, tokenizer_config={"tokenizer_class": "ChatGLM4Tokenizer"})
    write_tiktoken(tmp_path / "tokenizer.model", ranks)
    tokenizer = load_tokenizer(tmp_path)
    public = tiktoken.Encoding("glm", pat_str=CL100K, mergeable_ranks=ranks, special_tokens={})
    assert all(tokenizer.encode(text) == public.encode_ordinary(text) for text in some_texts(300, seed=3))
    begin = [len(ranks) + 2, len(ranks) + 4]
    assert encode_prompt("ab", NO_CONFIG, tokenizer) == begin + tokenizer.encode("ab")
    text = chat_template_of(tokenizer).render_prompt(Conversation(CHAT[:1]), "chat").text
    assert text == "[gMASK]<sop><|user|>\nab é<|assistant|>"
    assert tokenizer.encode_marked(text)[0][:2] == begin


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [*lines, b"####"], r"qwen.tiktoken, line 701: not a token in base64 and its rank"),
        (lambda lines: [*lines, b"YQ== x"], r"line 701: not a token"),
        (lambda lines: lines[:200], r"not whole: it must have all 256 bytes"),
        (lambda lines: lines[:400] + lines[401:], r"not whole: .*ranks from 0 on without gaps"),
        (lambda lines: [b"\xff\xfe"], r"line 1: not a token"),
    ],
)
def test_a_damaged_tiktoken_file(qwen, change, says):
    lines = (qwen / "qwen.tiktoken").read_bytes().splitlines()
    (qwen / "qwen.tiktoken").write_bytes(b"\n".join(change(lines)))
    with pytest.raises(UserError, match=says):
        load_tokenizer(qwen)


def test_a_tiktoken_file_of_code_that_is_not_known(qwen):
    say(qwen, tokenizer_config={"tokenizer_class": "OtherTokenizer"})
    with pytest.raises(
        UserError, match=r"how OtherTokenizer cuts texts stands in Python code, which is not run \(known: QWen"
    ):
        load_tokenizer(qwen)


@pytest.fixture
def gpt2(tmp_path, byte_level):
    vocabulary, merges = byte_level
    say(tmp_path / "gpt2", vocab={**vocabulary, "<|endoftext|>": len(vocabulary)})
    lines = "".join(" ".join(merge) + "\n" for merge in merges)
    (tmp_path / "gpt2" / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    return tmp_path / "gpt2"


def test_gpt_2s_vocabulary_and_merges_give_the_ids_of_transformers(gpt2):
    tokenizer = load_tokenizer(gpt2)
    public = GPT2Tokenizer.from_pretrained(gpt2)
    for text in some_texts(1000, seed=4):
        assert tokenizer.encode(text) == public(text).input_ids, repr(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token(tokenizer.eos_id) == "<|endoftext|>"
    assert tokenizer.eos_id not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eos_id in tokenizer.encode_marked("a<|endoftext|>b")[0]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("merges.txt", None, r"vocab.json: merges.txt is missing beside it"),
        ("merges.txt", b"a\n", r"merges.txt: not a merge of tokens in vocab.json: a$"),
        ("merges.txt", b"a \xff", r"merges.txt: not the merges of a tokenizer"),
        ("vocab.json", b"[]", r"vocab.json: holds no object"),
        ("vocab.json", b'{"a": "b"}', r"vocab.json: must be an object of tokens and their ids"),
        ("added_tokens.json", b'{"<x>": 5000}', r"give <x> the id 5000, which has to be 701"),
    ],
)
def test_a_damaged_vocabulary(gpt2, file, content, says):
    (gpt2 / file).unlink() if content is None else (gpt2 / file).write_bytes(content)
    with pytest.raises(UserError, match=says):
        load_tokenizer(gpt2)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A sentencepiece model in Llama's manner: a space before every text, bytes for what it lacks, some symbols of its own."""
    directory = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(f"ab b{i % 7} ba aab é {i}" for i in range(200)),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        user_defined_symbols=["<reserved_106>", "<reserved_107>", "<eoh>", "<eoa>"],
        remove_extra_whitespaces=False,
    )
    return (directory / "tokenizer.model").read_bytes()


def with_pieces(directory, pieces, **files):
    say(directory, **files)
    (directory / "tokenizer.model").write_bytes(pieces)
    return load_tokenizer(directory)


def public_pieces(pieces):
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(pieces)
    return processor


def test_chatglm3s_chat_has_the_ids_that_its_code_builds(tmp_path, pieces):
    tokenizer, public = (
        with_pieces(tmp_path, pieces, tokenizer_config={"tokenizer_class": "ChatGLMTokenizer"}),
        public_pieces(pieces),
    )
    names = KNOWN["ChatGLMTokenizer"].appended
    ids = {name: public.vocab_size() + index for index, name in enumerate(names)}
    assert tokenizer.vocab_size == public.vocab_size() + len(names)
    expected = [ids["[gMASK]"], ids["sop"]]
    for message in CHAT:  # build_single_message: the role, the line of metadata, the content, each encoded apart
        expected += [ids[f"<|{message['role']}|>"], *public.encode("\n"), *public.encode(message["content"])]
    chat = chat_template_of(tokenizer).render_prompt(Conversation(CHAT), "chat")
    assert encode_chat(chat, tokenizer)[0] == [*expected, ids["<|assistant|>"]]
    assert encode_prompt("ab", NO_CONFIG, tokenizer) == [ids["[gMASK]"], ids["sop"], *public.encode("ab")]
    assert set(end_ids((), tokenizer)) == {public.eos_id(), ids["<|user|>"], ids["<|observation|>"]}
    assert tokenizer.decode([ids["<|user|>"], *public.encode("ab"), ids["sop"]]) == "<|user|>absop"
    assert ids["<|user|>"] not in tokenizer.encode("a <|user|> b")


def test_internlm_is_written_in_one_text(tmp_path, pieces):
    tokenizer, public = (
        with_pieces(tmp_path, pieces, tokenizer_config={"tokenizer_class": "InternLMTokenizer"}),
        public_pieces(pieces),
    )
    chat = chat_template_of(tokenizer).render_prompt(Conversation(CHAT[:1]), "chat")
    assert chat.text == "<s><|User|>:ab é<eoh>\n<|Bot|>:"
    assert encode_chat(chat, tokenizer)[0] == [public.bos_id(), *public.encode("<|User|>:ab é<eoh>\n<|Bot|>:")]
    assert public.piece_to_id("<eoa>") in end_ids((), tokenizer)


def test_baichuans_chat_needs_its_tokens_at_their_places(tmp_path, pieces, monkeypatch):
    config = {"tokenizer_class": "BaichuanTokenizer"}
    assert not with_pieces(tmp_path, pieces, tokenizer_config=config).chat_template
    public = public_pieces(pieces)
    monkeypatch.setitem(KNOWN["BaichuanTokenizer"].marks, "<reserved_106>", public.piece_to_id("<reserved_106>"))
    monkeypatch.setitem(KNOWN["BaichuanTokenizer"].marks, "<reserved_107>", public.piece_to_id("<reserved_107>"))
    tokenizer = with_pieces(tmp_path, pieces, tokenizer_config=config)
    user, assistant = (public.piece_to_id(f"<reserved_{number}>") for number in (106, 107))
    chat = chat_template_of(tokenizer).render_prompt(Conversation(CHAT), "chat")
    words = [public.encode(message["content"]) for message in CHAT]
    assert encode_chat(chat, tokenizer)[0] == [user, *words[0], assistant, *words[1], user, *words[2], assistant]


def test_tokens_that_files_add_to_a_sentencepiece_model(tmp_path, pieces):
    public = public_pieces(pieces)
    decoder = {
        "300": {"content": "<|im_start|>", "special": True},
        "299": {"content": "<|im_end|>"},  # another name for a piece that was kept free
        "302": {"content": "xx", "special": False},
        "1": {"content": "<s>", "special": True},
    }
    config = {
        "added_tokens_decoder": decoder,
        "pad_token": "[PAD]",
        "additional_special_tokens": ["<|im_start|>", "<eoh>"],
    }
    tokenizer = with_pieces(tmp_path, pieces, tokenizer_config=config, added_tokens={"[PAD]": 301})
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (303, 301)
    assert tokenizer.encode_marked("<|im_start|>ab<|im_end|><eoh>")[0] == [
        300,
        *public.encode("ab"),
        299,
        public.piece_to_id("<eoh>"),
    ]
    assert tokenizer.encode("axxb<|im_start|>") == [*public.encode("a"), 302, *public.encode("b<|im_start|>")]
    assert tokenizer.decode([300, *public.encode("ab"), 299, 302, 4000]) == "<|im_start|>ab<|im_end|>xx"
    assert [tokenizer.token(id) for id in (1, 299, 302)] == ["<s>", "<|im_end|>", "xx"]
    assert tokenizer.fingerprint != with_pieces(tmp_path / "plain", pieces).fingerprint


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "tokenizer_config",
            {"eos_token": 5},
            r"tokenizer_config.json: eos_token: must be the name of a token.*\(value 5\)",
        ),
        ("tokenizer_config", {"eos_token": {"text": "a"}}, r"eos_token: must be the name of a token"),
        ("tokenizer_config", {"bos_token": {"content": [1]}}, r"bos_token: must be the name of a token"),
        ("tokenizer_config", {"pad_token": ["a"]}, r"pad_token: must be the name of a token"),
        ("tokenizer_config", {"add_bos_token": "yes"}, r"add_bos_token: must be true or false \(value yes\)"),
        ("tokenizer_config", {"tokenizer_class": ["a"]}, r"tokenizer_class: must be a text"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": [1]},
            r"added_tokens_decoder: must be an object of ids and tokens",
        ),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            r"whose keys are ids of tokens \(value x\)",
        ),
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 30: "a"}}, r"whose keys are ids of tokens"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"7": 8}},
            r"added_tokens_decoder.7: must be the name of a token",
        ),
        ("tokenizer_config", {"additional_special_tokens": "a"}, r"additional_special_tokens: must be a list of names"),
        (
            "tokenizer_config",
            {"additional_special_tokens": [None]},
            r"additional_special_tokens: must be the name of a token",
        ),
        ("special_tokens_map", {"eos_token": True}, r"special_tokens_map.json: eos_token: must be the name of a token"),
        ("added_tokens", {"<pad>": "9"}, r"added_tokens.json: <pad>: must be the id of the token \(value 9\)"),
        ("added_tokens", {"<pad>": -1}, r"must be the id of the token"),
        (
            "generation_config",
            {"eos_token_id": "2"},
            r"generation_config.json: eos_token_id: must be the id of a token",
        ),
        (
            "generation_config",
            {"eos_token_id": [2, None, 1.5]},
            r"eos_token_id: must be the id of a token, or a list of them",
        ),
        ("generation_config", {"eos_token_id": True}, r"eos_token_id: must be the id of a token"),
        ("generation_config", {"pad_token_id": 10**30}, r"pad_token_id: must be the id of a token"),
    ],
)
def test_token_settings_of_the_wrong_type(tmp_path, pieces, file, content, says):
    with pytest.raises(UserError, match=says) as error:
        with_pieces(tmp_path, pieces, **{file: content})
    assert "\n" not in str(error.value)
