"""A conversation: what is remembered, forgotten, too long or interrupted, and what the terminal shows of it."""

import contextlib
import io
from concurrent.futures import Future
from typing import ClassVar

import pytest
from tiny import options, tiny_config, tiny_model

from mindllm.cli import generation as module
from mindllm.config import RunConfig
from mindllm.config.dataset import TrainDatasetConfig
from mindllm.errors import UserError
from mindllm.generate.chat import Chat
from mindllm.generate.generator import Generator
from mindllm.generate.prompts import Conversation, conversation_encoder


class Characters:
    """A tokenizer of single characters."""

    eos_id = bos_id = None
    end_ids = ()
    chat_template = None
    path = "tokenizer.json"
    special_tokens: ClassVar = {}
    special_names = ()

    def encode(self, text):
        return [ord(character) % 97 for character in text]

    def encode_marked(self, text):
        return self.encode(text), [(index, index + 1) for index in range(len(text))]

    def decode(self, ids):
        return "".join(chr(97 + index % 26) for index in ids)


@pytest.fixture(scope="module")
def generator():
    config = tiny_config(seq_length=256)
    return Generator(tiny_model(config), config, Characters())


def configured(generator, **keys):
    return RunConfig.model_construct(
        run_mode="chat",
        load_checkpoint="some",
        seed=0,
        model=type("Model", (), {"config": generator.model_config}),
        processor=type("Processor", (), {"tokenizer": type("Tokenizer", (), {"vocab_file": "some"})}),
        generation=options(20, **keys),
        train_dataset=TrainDatasetConfig(),
    )


def conversation(generator, **keys):
    config = configured(generator, **keys)
    return Chat(config, generator, conversation_encoder(config, Characters()))


def test_answers_continue_the_whole_conversation(generator):
    talk = conversation(generator, system_prompt="Be kind.")
    first, second = "".join(talk.answer("Hello")), "".join(talk.answer("And?"))
    assert talk.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": second},
    ]
    prompt = conversation_encoder(configured(generator), Characters())(Conversation(tuple(talk.messages[:-1])))
    assert generator.generate([prompt], options(20))[0].text == second
    talk.clear()
    assert talk.messages == [{"role": "system", "content": "Be kind."}]
    assert "".join(talk.answer("Hello")) == first


def test_an_answer_that_is_left_is_remembered_as_far_as_it_was_written(generator):
    talk = conversation(generator)
    answer = talk.answer("Hello")
    written = next(answer) + next(answer)
    answer.close()
    assert talk.messages[-1] == {"role": "assistant", "content": written}


def test_the_answer_is_shortened_to_the_room_and_none_is_an_error(generator):
    talk = conversation(generator)
    around = len("### Instruction:\n\n\n### Response:\n")
    assert len("".join(talk.answer("x" * (256 - around - 7)))) == 7
    remembered = list(talk.messages)
    with pytest.raises(UserError, match=r"longer than the 256 tokens .* clear it"):
        next(talk.answer("y"))
    assert talk.messages == remembered


def test_the_terminal(generator, monkeypatch, capsys):
    found = Future()
    found.set_result(None)
    monkeypatch.setattr("mindllm.data.run_tokenizer", lambda config: Characters())
    monkeypatch.setattr("mindllm.generate.load.finding_weights", lambda config: contextlib.nullcontext(found))
    monkeypatch.setattr("mindllm.generate.load.load_generator", lambda config, tokenizer, weights: generator)
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("Hello\n\nAgain\nclear\nHello\n" + "x" * 300 + "\n EXIT \nnever read\n")
    )
    module.chat(configured(generator))
    written = capsys.readouterr()
    first, second, third = written.out.splitlines()
    assert first == third != second
    assert "new conversation" in written.err
    assert "longer than the 256 tokens" in written.err
    assert "decode: " in written.err


def test_ctrl_c_stops_the_answer_and_not_the_conversation(generator, monkeypatch, capsys):
    talk = conversation(generator)

    def interrupted(piece):
        print(piece, end="")
        if piece != "\n":
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write", interrupted)
    module._write_answer(talk, "Hello")
    assert capsys.readouterr().out == talk.messages[-1]["content"] + "\n"
    assert len(talk.messages) == 2
