"""Whatever is given, the answer is a configuration or a UserError; and what is rendered reads back equal."""

import random
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from mindllm.config import load_config, override_config, render_config
from mindllm.config.reading.schema import walk
from mindllm.config.reading.yaml_tree import (
    command_line_options,
    inline_yaml,
    read_value,
    read_yaml,
    write_commented,
    write_yaml,
)
from mindllm.config.run import RunConfig
from mindllm.errors import UserError

KEYS = sorted({".".join(path) for path, _, _ in walk(RunConfig)})
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 100) | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
READABLE = st.characters(codec="utf-8", exclude_characters="\0")
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
QUICK = settings(max_examples=100, deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(
    text=st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
    | st.text("{}[]:,&*!-?|>'\"#%@ \n\tab1", max_size=40)
)
def test_any_text_is_a_document_or_an_error(text):
    with suppress(UserError):
        read_yaml(text, "x.yaml")


@QUICK
@given(key=st.sampled_from(KEYS), value=PLAIN)
def test_any_value_under_any_key_is_taken_or_refused_by_name(small_run, key, value):
    assert_reads_back(small_run, {key: value})


@QUICK
@given(key=st.sampled_from(KEYS), text=st.text(max_size=12))
def test_any_option_is_taken_or_refused(small_run, key, text):
    assert_reads_back(small_run, [f"--{key}={text}"])


schedules = st.sampled_from(
    ["ConstantWarmUpLR", "LinearWithWarmUpLR", "CosineWithRestartsAndWarmUpLR", "WarmUpStableDecayLR"]
)
positive = st.floats(1e-30, 1e30)


@settings(QUICK, max_examples=30)
@given(
    rate=positive,
    kind=schedules,
    layers=st.integers(2, 40),
    stages=st.integers(1, 2),
    scale=positive
    | st.fixed_dictionaries({"type": st.just("DynamicLossScaleUpdateCell"), "scale_window": st.integers(1, 9)}),
    select=st.booleans()
    | st.dictionaries(st.sampled_from([r"feed_forward\.mul", r".*\.norm"]), st.booleans(), min_size=1),
    prompt=st.text(READABLE, max_size=20) | st.lists(st.text(READABLE, max_size=5)),
    name=st.text(READABLE, max_size=10),
)
def test_what_is_rendered_reads_back_equal(small_run, rate, kind, layers, stages, scale, select, prompt, name):
    changes = {
        "lr_schedule": {"type": kind, "learning_rate": rate},
        "model.model_config.num_layers": layers,
        "model.model_config.offset": [0] * (stages - 1) + [layers % stages],
        "use_parallel": stages > 1,
        "parallel_config": {"pipeline_stage": stages, "micro_batch_num": stages},
        "runner_wrapper.scale_sense": scale,
        "recompute_config.select_recompute": select,
        "input_data": prompt,
        "trainer.model_name": name,
    }
    config = override_config(small_run, changes)
    again = read_back(config)
    assert again == config
    assert render_config(again) == render_config(config)


@settings(QUICK, max_examples=300)
@given(text=st.text(READABLE, max_size=20) | st.text("0123456789+-.eE_:naninfxob~=<>yestrue \t\n#'\"", max_size=10))
def test_any_text_is_written_so_that_it_reads_back(text):
    assert read_yaml(write_yaml({"key": text, "list": [text]}), "x.yaml").data == {"key": text, "list": [text]}


HOSTILE = (
    *("9" * 400, "-" + "9" * 400, "0x" + "f" * 800, "9223372036854775808", "1000000007", "-1", "0", "1", "1.5"),
    *("1e999", "1e-320", ".nan", ".inf", "-.inf", "1:1:1:1", "[.nan, 99999999999]", "[99999999999999]", "[0]"),
    *("!!timestamp 2024-01-01", "!!timestamp 99999-99-99", "2024-01-01", "!!binary aGFsbG8=", "!!set {a: 1}"),
    *("!!int ''", "!!float ''", "!!bool maybe", "~", "true", "''", "<<", "=", "'*'", "*a", "&a [1]", "None"),
    *("[]", "{}", "[[]]", "[{}]", "[null]", "{type: {a: 1}}", "{type: [1]}", "[{type: {a: 1}}]", "[{type: null}]"),
    *(
        "{a: {b: {c: [1, {d: 2}]}}}",
        "[[1, [2]], -3]",
        "{0: 1}",
        "{'': 1}",
        "{'*': 0.5}",
        "[true]",
        '"\\0"',
        '"\\ud800"',
    ),
    *("'" + "x" * 5000 + "'", "'" + "1" * 5000 + "'", "'1" + ":1" * 400 + ".5'", "[" + "1," * 300 + "]", "../../x"),
)


@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_hostile_values_in_a_file_are_taken_or_refused(write, minimal, tmp_path, count):
    write(minimal, "base.yaml")
    choose = random.Random(count)
    for _ in range(count):
        parts, value = choose.choice(KEYS).split("."), choose.choice(HOSTILE)
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
        (tmp_path / "run.yaml").write_text("\n".join(["base: base.yaml", *lines]) + f" {value}\n", encoding="utf-8")
        with suppress(UserError):
            load_config(tmp_path / "run.yaml")


KEY = st.text(READABLE, min_size=1, max_size=6)
TREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(READABLE, max_size=200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=6,
)


@QUICK
@given(tree=st.dictionaries(KEY, TREE, min_size=1, max_size=4), comment=st.text(max_size=200))
def test_any_tree_with_comments_reads_back(tree, comment):
    comments = {("key",): comment, **{("key", key): comment for key in tree}}
    assert read_yaml(write_commented({"key": tree}, comments), "x.yaml").data == {"key": tree}


@QUICK
@given(value=TREE)
@example(value={r"feed_forward\.mul": [1, 0], "'\"\\": "$HOME `a` \n"})
@example(value="...")
def test_a_value_on_one_line_is_an_option_that_reads_back(value):
    text = inline_yaml(value)
    assert "\n" not in text
    assert read_value(text, "--a") == value
    assert read_yaml(f"key: {text}", "x.yaml").data == {"key": value}
    assert shlex.split(command_line_options({"a.b": value, "c": 1})) == [f"--a.b={text}", "--c=1"]


def assert_reads_back(small_run, overrides) -> None:
    try:
        config = override_config(small_run, overrides)
    except UserError:
        return
    assert read_back(config) == config


def read_back(config: RunConfig) -> RunConfig:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rendered.yaml"
        path.write_text(render_config(config), encoding="utf-8")
        return load_config(path)
