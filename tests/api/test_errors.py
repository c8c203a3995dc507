"""The parts of an error are fields: file, line, option, key, value, reason, and what to write."""

import pickle

import pytest
import yaml
from run_fixtures import MINIMAL

import mindllm
from mindllm.config import load_config
from mindllm.config.reading.document import Problem
from mindllm.errors import UserError


def refused(source, overrides=()) -> UserError:
    """Return the error that loading raises."""
    with pytest.raises(UserError) as found:
        load_config(source, overrides)
    return found.value


def test_a_mistake_in_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"sed: 4\n{yaml.safe_dump(MINIMAL)}")
    error = refused(path)
    assert (error.file, error.line, error.key, error.value) == (str(path), 1, "sed", 4)
    assert (error.reason, error.advice, error.option) == ("unknown key", "did you mean 'seed'?", "")
    assert str(error) == f"{path}:1: sed: unknown key (value 4); did you mean 'seed'?"


def test_a_mistake_in_an_option():
    error = refused(MINIMAL, {"seed": -1})
    assert (error.option, error.file, error.line) == ("override seed=-1", "", None)
    assert (error.key, error.value, error.reason) == ("seed", -1, "must be at least 0")


def test_all_mistakes_are_there_though_not_all_are_shown():
    wrong = {f"wrong{number}": number for number in range(50)}
    error = refused(MINIMAL | wrong)
    assert {problem.key: problem.value for problem in error.problems} == wrong
    assert str(error).endswith("and 10 more mistakes")


def test_a_cross_check_has_its_value(tmp_path):
    error = refused(MINIMAL, {"model.model_config.num_heads": 7})
    assert (error.key, error.value) == ("model.model_config.num_heads", 7)


def test_an_error_found_after_loading_has_its_parts():
    error = load_config(MINIMAL).error("model.model_config.num_layers", "too many (value 8); write 4")
    assert (error.key, error.value, error.reason, error.advice) == (
        "model.model_config.num_layers",
        8,
        "too many",
        "write 4",
    )


@pytest.mark.parametrize(
    ("message", "reason", "advice"),
    [
        ("must be 1 (value a; b (c)); write 1", "must be 1", "write 1"),
        ("this key is required", "this key is required", ""),
        ("is not there; write another\nor none", "is not there", "write another\nor none"),
        ("is odd (value (2))", "is odd", ""),
    ],
)
def test_the_form_of_a_message(message, reason, advice):
    problem = Problem(None, ("a", 0), message)
    assert (problem.reason, problem.advice, problem.key, str(problem)) == (reason, advice, "a.0", f"a.0: {message}")


def test_an_error_without_a_place_has_its_message():
    error = UserError("--stages 9: there is no such stage; write 0 to 7")
    assert (error.problems, error.reason, error.advice) == ((), "--stages 9: there is no such stage", "write 0 to 7")


def test_errors_cross_processes_with_their_parts():
    error = pickle.loads(pickle.dumps(refused(MINIMAL, {"seed": -1})))
    assert (str(error), error.key, error.value) == ("override seed=-1: seed: must be at least 0 (value -1)", "seed", -1)


def nested(levels):
    """A list in a list, and so on."""
    value = []
    for _ in range(levels):
        value = [value]
    return value


CYCLE: dict = {"a": 1}
CYCLE["a"] = CYCLE
BRANCHES: dict = {"a": 1}
BRANCHES["a"] = BRANCHES["b"] = BRANCHES
LONG = "x" * 10_000


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


HOSTILE = [CYCLE, BRANCHES, nested(3000), LONG, 10**5000, Unprintable(), (each for each in "ab"), "\ud800", "a\0b"]
IDS = ["cycle", "branches", "deep", "long", "huge", "unprintable", "generator", "surrogate", "null"]


@pytest.mark.parametrize("value", HOSTILE, ids=IDS)
@pytest.mark.parametrize(
    "call",
    [
        lambda value: mindllm.load_config(value),
        lambda value: mindllm.load_config({"model": value}),
        lambda value: mindllm.load_config({"seed": value}),
        lambda value: mindllm.load_config({}, {"seed": value}),
        lambda value: mindllm.load_config({}, {"model.model_config": value}),
        lambda value: mindllm.step_time({}, device=value),
        lambda value: mindllm.configure(no_such_argument=value),
        lambda value: mindllm.configure(value),
        lambda value: mindllm.inspect(value),
        lambda value: mindllm.time_program(value),
    ],
)
def test_values_that_no_run_has_are_mistakes_of_the_user(call, value):
    with pytest.raises(UserError) as refused:
        call(value)
    assert 0 < len(str(refused.value)) < 20_000


def test_thousands_of_arguments_and_long_names():
    for arguments, options in (([1] * 10_000, {}), ([], {LONG: 1}), (["run.yaml"], {LONG: LONG})):
        with pytest.raises(UserError) as refused:
            mindllm.step_time(*arguments, **options)
        assert len(str(refused.value)) < 40_000
    with pytest.raises(AttributeError) as missing:
        getattr(mindllm, LONG)
    assert len(str(missing.value)) < 200
