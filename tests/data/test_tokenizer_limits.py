"""Tokenizers are programs: what may grow or search without bound is refused in one line, and special tokens stay as allowed."""

import base64
import json
import time
from pathlib import Path

import pytest
from chats import SPECIAL, chat_tokenizer

from mindllm.data import load_tokenizer
from mindllm.data.preprocess import build as preprocess
from mindllm.data.preprocess import resume
from mindllm.data.preprocess.build import build
from mindllm.data.preprocess.sources import find_sources
from mindllm.data.tokenizers import limits
from mindllm.data.tokenizers.limits import KNOWN_PATTERNS, LONGEST_TEXT, check_bounds
from mindllm.data.tokenizers.special_tokens import count_names
from mindllm.data.tokenizers.tokenizer import is_cuttable
from mindllm.errors import UserError


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*steps, key="normalizers"):
    return {"type": "Sequence", key: list(steps)}


def charsmap(length):
    content = (4).to_bytes(4, "little") + bytes(4) + b"x" * length + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


GROWING = {
    "a chain": sequence(*[replace("a", "a" * 100)] * 48),
    "a chain of chains": sequence(sequence(replace("a", "a" * 40)), sequence(sequence(replace("a", "a" * 40)))),
    "one step": replace("a", "b" * 2000),
    "an empty pattern": replace("", "ab"),
    "an empty expression": replace("", "ab", "Regex"),
    "an expression": replace("a*", "b" * 2000, "Regex"),
    "a prefix": sequence(*[{"type": "Prepend", "prepend": "a" * 100}] * 200),
    "a map of characters": charsmap(5000),
    "many steps": sequence(*[{"type": "Lowercase"}] * 300),
}
HARMLESS = {
    "spaces": replace(" ", "▁"),
    "llama": sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
    "runs of spaces": sequence({"type": "NFKC"}, replace(" {2,}", " ", "Regex")),
    "quotes": sequence(replace("``", '"'), replace("''", '"')),
    "a small map": charsmap(33),
    "nothing": None,
}


def written(tmp_path, **changes):
    chat_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("section", ["normalizer", "decoder"])
def test_steps_that_grow_without_bound_are_refused(tmp_path, name, section):
    if section == "decoder" and name in ("a prefix", "a map of characters", "many steps"):
        section = "normalizer"
    began = time.perf_counter()
    value = json.loads(
        json.dumps(GROWING[name]).replace("normalizers", "decoders" if section == "decoder" else "normalizers")
    )
    path = written(tmp_path, **{section: value})
    with pytest.raises(UserError, match=f"tokenizer.json: {section}") as refused:
        load_tokenizer(path)
    assert "\n" not in str(refused.value)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_steps_are_run(name):
    assert check_bounds({"normalizer": HARMLESS[name], "model": {}}, Path("t.json")) == 1.0


def test_a_long_text_of_a_growing_tokenizer_is_not_encoded(tmp_path):
    tokenizer = load_tokenizer(written(tmp_path, normalizer=replace("a", "b" * 500)))
    assert len(tokenizer.encode("a" * 20)) > 20
    with pytest.raises(UserError, match=r"may make 35,000,000 characters of a text of 70,000; at most"):
        tokenizer.encode("a" * 70_000)
    with pytest.raises(UserError, match=r"divide the text"):
        load_tokenizer(written(tmp_path, normalizer=None)).encode("a" * (LONGEST_TEXT + 1))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(x+x+)+y", "(?:\\w|\\d)*!!", "("])
def test_expressions_without_end_are_refused(tmp_path, pattern):
    path = written(tmp_path, pre_tokenizer=split(pattern))
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json") as refused:
        load_tokenizer(path)
    assert "\n" not in str(refused.value)


def test_a_process_of_its_own_bounds_time_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CPU_SECONDS", 0)
    with pytest.raises(UserError, match=r"they take over 0 seconds or 1024 MiB \(exit code -"):
        load_tokenizer(written(tmp_path, pre_tokenizer=split(r"\w+|\W")))


def test_known_expressions_need_no_other_process(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "_try_apart", None)
    for pattern in KNOWN_PATTERNS:
        load_tokenizer(written(tmp_path, pre_tokenizer=split(pattern)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {}}},
            "max_input_chars_per_word: must be",
        ),
        ({"added_tokens": [{"content": "a" * (LONGEST_TEXT + 1)}]}, "added_tokens: may have"),
    ],
)
def test_other_sizes(changes, says):
    with pytest.raises(UserError, match=says):
        check_bounds(changes, Path("t.json"))


TEXT = "a<|im_start|>b<|im_end|> <s>c\n<|im_start|>"


@pytest.fixture(params=["json", "sentencepiece"])
def tokenizer(request, tmp_path):
    if request.param == "json":
        return chat_tokenizer(tmp_path)
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c what is it " * 4] * 50),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=290,
        byte_fallback=True,
        control_symbols=list(SPECIAL[1:3]),
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return load_tokenizer(tmp_path / "tokenizer.model")


def test_special_tokens_that_text_may_contain(tokenizer):
    start, end = (tokenizer.encode_marked(name)[0][-1] for name in ("<|im_start|>", "<|im_end|>"))
    assert not {start, end} & set(tokenizer.encode(TEXT))
    allowing = tokenizer.allowing(["<|im_start|>"])
    ids = allowing.encode(TEXT)
    assert (ids.count(start), ids.count(end)) == (2, 0)
    assert allowing.fingerprint == tokenizer.fingerprint
    assert tokenizer.allowed_special_tokens == (), "the tokenizer itself is not changed"
    with pytest.raises(
        UserError, match=r"<\|im_strat\|> \(allowed_special_tokens\) is not a special token .*<\|im_start\|>"
    ):
        tokenizer.allowing(["<|im_strat|>"])


def test_text_with_all_tokens_allowed_is_encoded_as_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = chat_tokenizer(tmp_path).allowing(SPECIAL)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert ours.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    assert is_cuttable(ours)


def test_a_corpus_with_allowed_tokens_and_a_count_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess, "PIECES_WORTH_A_WORKER", 1)
    chat_tokenizer(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(TEXT * 7_000)
    sources = find_sources([tmp_path / "text"], [], [])
    counts = {"<|im_end|>": 21_000, "<s>": 21_000}
    for workers in (1, 2):
        tokenizer = load_tokenizer(tmp_path / "model", ["<|im_start|>"])
        made = build(sources, tmp_path / f"c{workers}", tokenizer, workers=workers)
        assert made.spelled_out == counts
    one, two = ((tmp_path / f"c{workers}.bin").read_bytes() for workers in (1, 2))
    assert one == two
    again = build(sources, tmp_path / "c1", tokenizer)
    assert again.up_to_date
    with pytest.raises(UserError, match="made from other files or options"):
        build(sources, tmp_path / "c1", load_tokenizer(tmp_path / "model"))


def test_counts_outlive_an_interruption(tmp_path, monkeypatch):
    tokenizer = chat_tokenizer(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.txt").write_text("x<|im_end|>y\n" * 25_000)
    sources = find_sources([tmp_path / "text"], [], [])
    monkeypatch.setattr(resume, "SAVE_BYTES", 1)

    encode, calls = resume._encode, iter(range(3))

    def stopping(*arguments):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return encode(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(resume, "_encode", stopping)
        with pytest.raises(KeyboardInterrupt):
            build(sources, tmp_path / "c", tokenizer)
    made = build(sources, tmp_path / "c", tokenizer)
    assert made.resumed_tokens
    assert made.spelled_out == {"<|im_end|>": 125_000}


def test_names_are_counted():
    assert count_names("<s> <s><|a|>", ["<s>", "<|a|>", "<|b|>", "[PAD]"]) == {"<s>": 2, "<|a|>": 1}
