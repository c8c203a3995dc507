"""Streaming of text: pieces are whole characters, and together they are the text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from mindllm.data.tokenizers.sentencepiece_tokenizer import train_byte_level_bpe
from mindllm.generate.choosing.growing import REPLACEMENT, TextStream

TEXT = "Grüße, 世界! 🙂👩‍👩‍👧 naïve café — ok"


class Bytes:
    """Every token is some bytes; the decoder writes replacement characters as Python and Rust do."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return b"".join(self.pieces[index] for index in ids).decode("utf-8", "replace")


def stream(decoder, tokens, prompt=()):
    text = TextStream(decoder, prompt)
    return [*map(text.push, tokens), text.finish()]


@pytest.fixture(scope="module")
def byte_level():
    return train_byte_level_bpe(["some words, some more words"], 260)


@pytest.fixture(scope="module")
def byte_fallback():
    """The decoder of Llama 2's ``tokenizer.json``: words with a leading space, and bytes for everything else."""
    words = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁some": 256, "▁words": 257, "▁": 258, "<unk>": 259}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def test_characters_of_several_tokens_appear_whole(byte_level):
    tokens = byte_level.encode(TEXT).ids
    assert len(tokens) > len(TEXT), "some characters are spread over tokens"
    pieces = stream(byte_level, tokens)
    assert "".join(pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert sum(piece == "" for piece in pieces) < len(TEXT), "text is not held back longer than needed"


def test_bytes_among_words_keep_their_spaces(byte_fallback):
    text = " words" + TEXT[6:]
    tokens = [256, 257, *TEXT[6:].encode()]
    assert "".join(stream(byte_fallback, tokens[1:], tokens[:1])) == text
    assert byte_fallback.decode(tokens) == "some" + text


def test_the_last_incomplete_character_is_not_lost(byte_level):
    tokens = byte_level.encode("a🙂").ids[:-1]
    assert "".join(stream(byte_level, tokens)) == byte_level.decode(tokens)


@given(st.data())
def test_any_bytes_cut_anywhere_give_their_text(data):
    text = data.draw(st.one_of(st.text(max_size=20).map(str.encode), st.binary(max_size=20)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    assert "".join(stream(Bytes(pieces), range(len(pieces)))) == text.decode("utf-8", "replace")


@given(st.text(min_size=1, max_size=20), st.integers(0, 20))
def test_a_prompt_is_not_repeated(text, length):
    pieces = [character.encode() for character in text]
    prompt, tokens = range(min(length, len(pieces))), range(min(length, len(pieces)), len(pieces))
    assert "".join(stream(Bytes(pieces), tokens, prompt)) == text[length:]
