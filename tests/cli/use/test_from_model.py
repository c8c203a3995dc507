"""``mindllm generate``: what a person may name and ask, without a model being built."""

import json

import pytest
from character_tokenizer import write_tokenizer

from mindllm.cli.generate import main, read_use
from mindllm.config import load_config
from mindllm.errors import UserError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory with a tokenizer of characters and a template, and no weights; the working directory is above it."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 1.0}))
    write_tokenizer(directory, TEMPLATE)
    monkeypatch.chdir(tmp_path)
    return directory


def asked(*arguments, verb="generate"):
    return read_use(list(map(str, arguments)), verb)[1]


def test_files_of_the_model_decide_and_the_yaml_repeats_it(model):
    config = asked(model, "--prompt", "hello", "--max_new_tokens", "7")
    assert (config.run_mode, config.input_data, config.generation.max_new_tokens) == ("predict", ("hello",), 7)
    assert (config.generation.do_sample, config.generation.temperature) == (True, 0.6)
    assert config.generation.apply_chat_template
    assert config.model.config.compute_dtype == "float32"
    assert load_config("output/tiny/generate.yaml") == config
    assert (
        "exact, which is faster on a CPU than the bfloat16 of config.json"
        in (model.parent / "output/tiny/generate.yaml").read_text()
    )
    assert asked("--config", "output/tiny/generate.yaml") == config


def test_without_a_template_or_raw_the_text_is_continued(model):
    assert not asked(model, "--prompt", "a", "--raw").generation.apply_chat_template
    said = json.loads((model / "tokenizer_config.json").read_text())
    del said["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(said))
    assert not asked(model, "--prompt", "a").generation.apply_chat_template


@pytest.mark.parametrize("prompt", ["12", "[1, 2]", "true", "prompts.jsonl", "a: b # c", "\n"])
def test_a_prompt_is_its_text(prompt, model):
    assert asked(model, "--prompt", prompt, "--prompt", "b").input_data == (prompt, "b")


def test_files_in_and_out(model, tmp_path):
    (tmp_path / "in.txt").write_text("one\n")
    config = asked(model, "--input", "in.txt", "--output", "out.jsonl")
    assert (config.input_data, config.save_file) == (str(tmp_path / "in.txt"), str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.yaml").is_file()


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoint/llm-3/manifest.json"])
def test_a_run_of_that_name_is_left_as_it_is(left, model, tmp_path):
    of_the_run = tmp_path / "output" / "tiny" / left
    of_the_run.parent.mkdir(parents=True)
    of_the_run.write_text('{"step": 1, "loss": 2.0}\n')
    kept = tmp_path / "output" / "tiny" / "chat.yaml"
    kept.write_text("run_mode: chat\n")
    assert asked(model, verb="chat").output_dir == str(tmp_path / "output" / "tiny-chat")
    assert kept.read_text() == "run_mode: chat\n"
    assert (tmp_path / "output" / "tiny-chat" / "chat.yaml").is_file()


def test_the_command_that_repeats_it_can_be_typed(model, tmp_path, capsys):
    asked(model, "--output", "my runs", verb="chat")
    assert "(repeat: mindllm chat 'my runs/chat.yaml')" in capsys.readouterr().err.replace("\n", " ")


def test_a_conversation_is_bounded_by_what_is_fast_here(model):
    content = CONFIG | {"max_position_embeddings": 1 << 17}
    (model / "config.json").write_text(json.dumps(content))
    config = asked(model, verb="chat")
    assert (config.run_mode, config.model.config.seq_length) == ("chat", 2048)
    assert asked(model, "--seq_length", "4096", verb="chat").model.config.seq_length == 4096


def test_where_nothing_can_be_written_it_answers_all_the_same(model, tmp_path, capsys):
    (tmp_path / "output").write_text("a file in the way")
    assert asked(model, "--prompt", "a").input_data == ("a",)
    assert "settings are not saved" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        asked(model, "--prompt", "a", "--output", "output/answers.jsonl")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a model is missing"),
        (["tiny", "--config", "x.yaml", "--prompt", "a"], "tiny: unexpected argument"),
        (["tiny"], "a prompt is missing"),
        (["tiny", "hello"], "hello: unexpected argument; pass a prompt with --prompt TEXT"),
        (["tiny", "--prompt", "a", "--input", "b"], "remove one"),
        (["tiny", "--input", "nowhere"], "--input nowhere: no such file"),
        (["tiny", "--prompt", "a", "--run_mode", "train"], "contradicts"),
        (["tiny", "--prompt", "a", "--no.such=1"], "unknown key"),
    ],
)
def test_what_is_wrong_is_said(arguments, said, model):
    with pytest.raises(UserError, match=said):
        asked(*arguments)


def test_a_model_without_weights_is_no_traceback(model, capsys):
    with pytest.raises(UserError, match=r"tiny.*safetensors"):
        main([str(model), "--prompt", "a"], "generate")
