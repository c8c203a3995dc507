"""Public functions validate their arguments against their signatures: every mistake is in one error, before any work."""

import inspect
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import pytest

import mindllm
from mindllm.arguments import checked, validated
from mindllm.config.generation import EvaluationConfig, GenerationConfig
from mindllm.errors import ALIKE

RUN = "configs/llama2/pretrain_llama2_7b_8p.yaml"
FUNCTIONS = [name for name in mindllm.__all__ if name.islower()]


def refused(name, *values, **options):
    """Return the error of a call."""
    with pytest.raises(mindllm.UserError) as found:
        getattr(mindllm, name)(*values, **options)
    return found.value


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_refuses_what_is_no_run_and_what_is_no_argument(name):
    error = refused(name, None, progres=print)
    first, *_ = inspect.signature(getattr(mindllm, name)).parameters
    told = {problem.key: problem for problem in error.problems}
    assert told[first].value is None
    assert told[first].reason.startswith("must be ")
    assert told[first].option == f"mindllm.{name}"
    assert told[first].advice
    assert "progres" in told or name in ("generate", "evaluate"), error


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_are_what_the_annotations_allow(name):
    """A signature whose default is refused could not be called with it."""
    function = inspect.unwrap(getattr(mindllm, name))
    known = inspect.signature(function).parameters
    required = {next(iter(known)): RUN, "devices": 8, "prompts": "a"}
    defaults = {key: one.default for key, one in known.items() if one.default is not one.empty}
    given = {key: value for key, value in (required | defaults).items() if key in known}
    assert validated(function, (), given) == ((), given)


@pytest.mark.parametrize(
    ("name", "options", "key", "reason", "advice"),
    [
        ("plan", {"interleave": 2}, "interleave", "must be a list", "write [2]"),
        ("plan", {"interleave": ["a"]}, "interleave", "each item must be an integer", "interleave: "),
        ("plan", {"interleave": [0]}, "interleave", "each item must be at least 1", "interleave: "),
        ("plan", {"seconds": float("nan")}, "seconds", "must be greater than 0", "seconds: "),
        (
            "plan",
            {"max_memory": "54"},
            "max_memory",
            "must be a size with a unit",
            "write a size such as",
        ),
        ("plan", {"formula": "yes"}, "formula", "must be True or False", ""),
        ("plan", {"formula": 1}, "formula", "must be True or False", "write True"),
        ("plan", {"progress": 3}, "progress", "must be a function", "progress: called with"),
        ("configure", {"devices": "8"}, "devices", "must be an integer", "write 8"),
        ("configure", {"devices": 8.0}, "devices", "must be an integer", "write 8"),
        ("configure", {"devices": True}, "devices", "must be an integer", "devices: number of devices"),
        ("configure", {"devices": 0}, "devices", "must be at least 1", "devices: number of devices"),
        ("configure", {}, "devices", "this argument is required", "devices: number of devices"),
        (
            "configure",
            {"devices": 8, "constraints": {}},
            "constraints",
            "must be a Constraints",
            "constraints: ",
        ),
        ("step_time", {"devicee": "h100"}, "devicee", "unknown argument", "did you mean 'device'?"),
        ("step_time", {"device": 3}, "device", "must be a Device or text or a path", "device: a device"),
        ("dry_run", {"stages": 0}, "stages", "must be a list", "write [0]"),
        ("search", {"schedules": "1f1b"}, "schedules", "must be a list", "write ['1f1b']"),
        ("prove", {"allow": None}, "allow", "must be text or a list", "leave it out"),
        (
            "load_config",
            {"overrides": "seed=3"},
            "overrides",
            "must be a list or a dictionary",
            "write a dict",
        ),
        (
            "load_config",
            {"overrides": {3: 3}},
            "overrides",
            "must be a list or a dictionary with text as keys",
            "write a dict",
        ),
        ("verify", {"steps": 2.5}, "steps", "must be an integer", "steps: optimizer steps"),
        ("generate", {"prompts": [3]}, "prompts", "must be text or a list", "prompts: "),
        ("generate", {"prompts": "a", "sed": 3}, "sed", "unknown argument", "did you mean 'seed'?"),
        ("evaluate", {"task": "piqa"}, "task", "unknown argument", "did you mean 'tasks'?"),
    ],
)
def test_a_mistake_says_what_to_write(name, options, key, reason, advice):
    error = refused(name, RUN, **options)
    assert (error.key, error.reason) == (key, reason)
    assert error.advice.startswith(advice)
    assert error.option == f"mindllm.{name}"
    if key in options:
        assert str(error.value) == str(options[key])


def test_several_runs_are_proved_one_by_one():
    assert refused("prove", [RUN, RUN]).advice.startswith("pass one run")


def test_all_mistakes_of_a_call_are_in_one_error():
    error = refused("step_time", RUN, "a100_80g", explain=None, zeroshot=True)
    assert {problem.key for problem in error.problems} == {"argument 2", "zeroshot", "explain"}
    assert (
        next(problem for problem in error.problems if problem.key == "argument 2").advice
        == "names: device, zero_shot, explain"
    )
    twice = refused("load_config", RUN, source=RUN)
    assert (twice.key, twice.reason) == ("source", "is passed twice")


def test_an_order_of_micro_batches_that_there_is_not():
    error = refused("search", RUN, schedules=["1f1c"])
    assert (error.key, error.value, error.advice) == ("schedules", "1f1c", "did you mean '1f1b'?")


def test_no_key_of_generation_is_taken_for_a_misspelt_argument():
    for name, section in (("generate", GenerationConfig), ("evaluate", EvaluationConfig)):
        names = [*inspect.signature(getattr(mindllm, name)).parameters]
        assert [
            key for key in section.model_fields if key not in names and get_close_matches(key, names, cutoff=ALIKE)
        ] == []


def test_numbers_and_lists_of_others_are_taken():
    """What looks like an integer, a list or a path is one."""

    @checked
    def taken(
        numbers: Sequence[int] | None = None, *, count: int = 1, some: Sequence[int] = (), place: Path | str = ""
    ):
        return numbers, count, some, place

    given = taken(count=np.int64(3), some=range(2), place=Path("a"))
    assert given == (None, 3, (0, 1), Path("a"))
    assert type(given[1]) is int
    assert taken(some=np.array([1, 2]))[2] == (1, 2)
