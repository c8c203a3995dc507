"""Networks by name and text by file: what a pretraining run is given."""

import json

import pytest
from tiny_chat import WORDS, save_tiny_chat_model

from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.recipes import fit
from mindllm.recipes.corpus import look_at_text, prepare_text
from mindllm.recipes.network import find_network, shipped_networks
from mindllm.recipes.pretraining import Pretraining, pretrain_recipe, vocabulary


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} " + " ".join(WORDS * 9)}) + "\n" for number in range(120)))
    return path


@pytest.fixture
def endless(monkeypatch):
    """Memory without end: what is chosen is looked at, not whether it fits."""
    monkeypatch.setattr(fit, "budget_of", lambda config: None)


def made(network, text, output, overrides=(), **options):
    return pretrain_recipe(Pretraining(network, text, output, overrides, **options), "mindllm pretrain").made(overrides)


@pytest.mark.parametrize("named", ["qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"])
def test_a_shipped_network_is_found_by_its_name(named):
    network = find_network(named)
    assert (network.name, network.architecture.hidden_size) == ("qwen2_5_0_5b", 896)


def test_a_name_that_is_near_is_told():
    with pytest.raises(UserError, match="no network of that name is shipped; did you mean 'llama3_8b'"):
        find_network("llama3_8")
    with pytest.raises(UserError, match=r"^llama3: no such directory, .*; shipped are llama3_1_70b, .*llama3_8b"):
        find_network("llama3")
    with pytest.raises(UserError, match="shipped are "):
        find_network("zzz")


def test_a_directory_its_config_and_a_yaml_are_networks(directory, tmp_path):
    for named in (directory, directory / "config.json"):
        network = find_network(str(named))
        assert (network.name, network.architecture.num_layers, network.directory) == ("tiny", 2, directory)
    (tmp_path / "mine.yaml").write_text(
        (shipped_networks()["llama2_tiny"]).read_text().replace("../base", "configs/base")
    )
    assert find_network(str(tmp_path / "mine.yaml")).architecture.vocab_size == 4096


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("name", ["llama2_13b_16p", "deepseek_v3_671b", "gemma2_2b", "gpt2", "mixtral_8x7b"])
def test_layouts_of_shipped_networks_are_put_back_for_what_is_here(name, text, tmp_path, directory):
    prepared = prepare_text([text], tmp_path, directory / "tokenizer.json", 0)
    run = made(find_network(name), prepared, tmp_path)
    run.write(tmp_path / "pretrain.yaml")
    assert load_config(tmp_path / "pretrain.yaml") == run.config
    assert run.config.parallel_config.device_num == 1
    assert run.config.model.config.vocab_size == prepared.tokenizer.vocab_size
    assert not run.config.recompute_config.recompute


def test_a_directory_keeps_its_tokenizer_or_follows_another(directory, text, tmp_path):
    network = find_network(str(directory))
    own = made(network, prepare_text([text], tmp_path / "a", network.tokenizer, 0), tmp_path / "a")
    assert own.config.pretrained_model_dir == str(directory)
    assert own.config.load_checkpoint == ""
    trained = prepare_text([text], tmp_path / "b", "", 270)
    other = made(network, trained, tmp_path / "b").config
    assert trained.trained
    assert (other.pretrained_model_dir, other.model.config.vocab_size) == ("", 270)
    assert other.model.config.n_kv_heads == network.architecture.n_kv_heads
    assert other.processor.tokenizer.vocab_file == str(tmp_path / "b/corpus/tokenizer.json")


def test_text_is_made_once_and_again_when_it_changed(text, tmp_path):
    changing = tmp_path / "text.jsonl"
    changing.write_text(text.read_text())
    first = prepare_text([changing], tmp_path, "", 280)
    again = prepare_text([changing], tmp_path, "", 280)
    assert (first.summary.up_to_date, again.summary.up_to_date) == (False, True)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    with changing.open("a") as file:
        file.write(json.dumps({"text": "zebra " * 40000}) + "\n")
    other = prepare_text([changing], tmp_path, "", 280)
    assert (other.summary.up_to_date, other.summary.meta.documents) == (False, 121)
    assert other.tokenizer.fingerprint != first.tokenizer.fingerprint


@pytest.mark.parametrize("own", [False, True])
def test_what_is_counted_is_what_is_made_and_nothing_is_written(own, directory, text, tmp_path, monkeypatch):
    monkeypatch.setattr(fit, "available_bytes", lambda: 20 * 2**30)  # what is free is written, too
    tokenizer = "" if own else directory / "tokenizer.json"
    texts = [text, tmp_path / "empty.txt", tmp_path / "latin.txt"]
    texts[1].touch()
    texts[2].write_bytes("déjà vu".encode("latin-1") + b"\n" + " ".join(WORDS * 3).encode())
    counted = look_at_text(texts, tmp_path / "out", tokenizer, 280)
    assert not (tmp_path / "out").exists()
    prepared = prepare_text(texts, tmp_path / "out", tokenizer, 280)
    assert counted.summary.meta == prepared.summary.meta
    assert (counted.summary.empty, counted.summary.invalid_utf8) == (
        prepared.summary.empty,
        prepared.summary.invalid_utf8,
    )
    assert (counted.tokenizer_file, counted.prefix) == (prepared.tokenizer_file, prepared.prefix)
    network = find_network(str(directory))
    assert made(network, counted, tmp_path / "out").yaml() == made(network, prepared, tmp_path / "out").yaml()
    again = look_at_text(texts, tmp_path / "out", tokenizer, 280)
    assert (again.summary.up_to_date, again.summary.meta) == (True, prepared.summary.meta)


def test_a_little_text_trains_a_smaller_vocabulary_than_was_asked_for(text, tmp_path):
    prepared = prepare_text([text], tmp_path, "", vocabulary(find_network("qwen2_5_0_5b"), 10_000))
    assert 257 < prepared.tokenizer.vocab_size < 4096


def test_a_text_file_is_a_document_and_held_out_is_none(directory, tmp_path):
    (tmp_path / "book.txt").write_text(" ".join(WORDS * 300))
    prepared = prepare_text([tmp_path / "book.txt"], tmp_path, directory / "tokenizer.json", 0)
    run = made(find_network(str(directory)), prepared, tmp_path).config
    assert prepared.summary.meta.documents == 1
    assert not run.do_eval
    assert run.train_dataset.data_loader.config.split == "1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', "record 2: has no key 'text'"),
        ('{"text": "a"}\n{bad\n', ":2: not a line of JSON"),
        ("", "files are empty"),
    ],
)
def test_bad_text_is_named_by_its_line(content, said, directory, tmp_path):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UserError, match=said):
        prepare_text([tmp_path / "bad.jsonl"], tmp_path, directory / "tokenizer.json", 0)


def test_more_passes_over_less_text_and_steps_of_few_tokens(directory, text, tmp_path):
    prepared = prepare_text([text], tmp_path, directory / "tokenizer.json", 0)
    run = made(find_network(str(directory)), prepared, tmp_path).config
    assert run.runner_config.epochs == 4  # few tokens for its parameters
    tokens = prepared.summary.meta.tokens
    steps = run.runner_config.epochs * int(0.98 * tokens) // (run.global_batch_size * run.model.config.seq_length)
    assert 100 <= steps <= 500
    assert made(find_network(str(directory)), prepared, tmp_path, epochs=2).config.runner_config.epochs == 2
