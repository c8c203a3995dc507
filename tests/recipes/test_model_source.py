"""What a person may name as a model, and what is said where it is none."""

import json

import pytest
from hugging_face import save_llama

from mindllm.errors import UserError
from mindllm.recipes.model_source import find_model

ADAPTER = "adapter_config.json"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_llama(path)
    return path


def refused(path, base=None):
    with pytest.raises(UserError) as error:
        find_model(path, base)
    return str(error.value)


def test_a_directory_says_network_type_and_name(directory):
    model = find_model(directory)
    assert (model.name, model.dtype, model.weights, model.adapter) == ("tiny-llama", "float32", directory, "")
    assert model.architecture.num_layers == 2


def test_an_adapter_brings_its_base_or_is_told_one(directory, tmp_path):
    (tmp_path / ADAPTER).write_text(json.dumps({"base_model_name_or_path": str(directory)}))
    assert find_model(tmp_path).weights == directory
    assert find_model(tmp_path).adapter == str(tmp_path)
    (tmp_path / ADAPTER).write_text(json.dumps({"base_model_name_or_path": "somebody/base"}))
    assert "names 'somebody/base', which is no model directory here; give --base DIR" in refused(tmp_path)
    assert find_model(tmp_path, directory).weights == directory


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny-lama", "tiny-lama: no such directory; did you mean 'tiny-llama'?"),
        ("", "is no model, but tiny-llama in it is: name "),
    ],
)
def test_what_is_near_is_named(directory, name, said):
    assert said in refused(directory.parent / name if name else directory.parent)


def test_a_name_on_the_hub_is_to_be_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("owner/model").endswith("a name on the hub is downloaded first: mindllm fetch owner/model")


def test_an_address_is_to_be_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = "https://huggingface.co/owner/model"
    assert refused(address).endswith(f"what it shows is downloaded first: mindllm fetch {address}")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", "has weights and no config.json"),
        ("notes.txt", "is no model: it has no config.json (it holds notes.txt)"),
    ],
)
def test_what_is_missing_is_named(file, said, tmp_path):
    (tmp_path / file).touch()
    assert said in refused(tmp_path)


def test_a_step_is_not_taken_for_another_one(tmp_path):
    (tmp_path / "llm-34").mkdir()
    with pytest.raises(UserError, match=r"llm-64: no such checkpoint; there is llm-34$"):
        find_model(tmp_path / "llm-64")


def test_a_directory_of_checkpoints_names_the_newest(tmp_path):
    for step in (8, 10):
        (tmp_path / "checkpoint" / f"llm-{step}").mkdir(parents=True)
        (tmp_path / "checkpoint" / f"llm-{step}" / "manifest.json").touch()
    with pytest.raises(UserError, match=r"holds checkpoints; name one of them, such as .*/checkpoint/llm-10$"):
        find_model(tmp_path / "checkpoint")


def test_a_run_without_a_checkpoint_is_told_apart(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    assert "the run has no checkpoint yet" in refused(tmp_path)


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ("---\nlicense: cc-by-nc-4.0\n---\n", "licence of tiny-llama (cc-by-nc-4.0): forbids commercial use"),
        (
            "---\nlicense: other\nlicense_name: own\n---\n",
            "licence of tiny-llama: own, which has conditions of its own",
        ),
        ("---\nlicense: apache-2.0\n---\nNot for non-commercial jokes.", ""),
        ("license: cc-by-nc-4.0", ""),
    ],
)
def test_a_licence_that_forbids_something_is_told(card, said, directory):
    (directory / "README.md").write_text(card)
    notes = find_model(directory).notes()
    assert said in "".join(notes)
    assert bool(notes) == bool(said)
