"""A run as choices: the YAML that is written repeats it, says why, and gives way to what the person asked for."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mindllm.config import load_config
from mindllm.recipes.recipe import Choice, Recipe

NETWORK = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "seq_length": 32}
CHOICES = (
    *(Choice(f"model.model_config.{key}", value, "tiny") for key, value in NETWORK.items()),
    Choice("generation.stop_strings", ["a: b", "# c", "\n"], "ends of a turn"),
    Choice("context.device_target", "CPU", "no device is here"),
    Choice("processor.tokenizer.vocab_file", "tokenizer.json", "of the model"),
)
RECIPE = Recipe("mindllm chat 'a model'", "configs/base/use.yaml", CHOICES)


def repeated(made, tmp_path):
    made.write(path := tmp_path / "deep" / "run.yaml")
    return load_config(path)


def test_the_yaml_repeats_the_run_from_anywhere(tmp_path, monkeypatch):
    made = RECIPE.made()
    monkeypatch.chdir(tmp_path)
    assert repeated(made, tmp_path) == made.config
    assert made.config.generation.stop_strings == ("a: b", "# c", "\n")


def test_every_choice_stands_with_its_reason_and_what_was_typed_on_top():
    lines = RECIPE.made().yaml().splitlines()
    assert lines[0] == "# Written by: mindllm chat 'a model'"
    assert "  device_target: CPU  # no device is here" in lines
    assert sum(line.endswith("# tiny") for line in lines) == len(NETWORK)


def test_what_was_asked_for_goes_before_a_choice_and_has_no_reason(tmp_path):
    made = RECIPE.made(["--model.model_config.num_layers=3", "--temperature", "0.5", "--callbacks.0.per_print_times=7"])
    config = repeated(made, tmp_path)
    assert config == made.config
    assert (config.model.config.num_layers, config.generation.temperature) == (3, 0.5)
    assert "    num_layers: 3\n" in made.yaml()
    assert {choice.key for choice in made.choices} == {c.key for c in CHOICES} - {"model.model_config.num_layers"}


def test_a_later_choice_replaces_an_earlier_one():
    made = RECIPE.with_choices([Choice("context.device_target", "Ascend", "asked")]).made()
    assert made.config.context.device_target == "Ascend"
    assert "device_target: Ascend  # asked" in made.yaml()


@pytest.fixture(scope="module")
def made():
    return RECIPE.made()


@given(reason=st.text(), command=st.text())
def test_no_text_of_a_person_leaves_its_comment(made, reason, command):
    one = replace(made.choices[0], reason=reason)
    tree = yaml.safe_load(replace(made, command=command, choices=(one, *made.choices[1:])).yaml())
    assert tree == made.tree
