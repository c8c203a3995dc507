"""Every mistake names the file and line (or the option), the key, the value, and what to write instead."""

import difflib

import pytest

from mindllm.config import load_config
from mindllm.config.reading.load import read_file
from mindllm.errors import MOST_SHOWN, UserError, few

# One mistake in a file whose first line it is: what stands there, the key and the value, and words of what the error says.
FILE_FAULTS = [
    ("parallel_config: {data_paralel: 1}", "parallel_config.data_paralel", 1, ["did you mean 'data_parallel'?"]),
    ("sed: 4", "sed", 4, ["did you mean 'seed'?"]),
    ("model: {preference: 4}", "model.preference", 4, ["did you mean 'preference' at the top level?"]),
    (
        "runner_config: {learning_rate: 4}",
        "runner_config.learning_rate",
        4,
        ["did you mean 'lr_schedule.learning_rate'?"],
    ),
    ("zzz: 4", "zzz", 4, ["unknown key", "valid: ", " and 41 more"]),
    ("seed: a", "seed", "a", ["an integer"]),
    ("seed: '4'", "seed", "4", ["an integer"]),
    ("seed: 1.0", "seed", 1.0, ["an integer"]),
    ("seed: true", "seed", True, ["an integer"]),
    ("seed: -1", "seed", -1, ["at least 0"]),
    ("do_eval: 1", "do_eval", 1, ["true or false"]),
    ("output_dir: 2024", "output_dir", 2024, ["text (in quotes"]),
    ("run_mode: training", "run_mode", "training", ["'train'", "did you mean 'train'?"]),
    ("optimizer: {eps: .nan}", "optimizer.eps", float("nan"), ["finite"]),
    ("optimizer: {learning_rate: 1}", "optimizer.learning_rate", 1, ["write lr_schedule.learning_rate"]),
    ("optimizer: {betas: [0.9]}", "optimizer.betas.1", None, ["required"]),
    ("optimizer: {betas: [0.9, 1.5]}", "optimizer.betas.1", 1.5, ["less than 1.0"]),
    ("runner_config: {sink_mode: true}", "runner_config.sink_mode", True, ["remove it"]),
    ("runner_config: 3", "runner_config", 3, ["section of keys"]),
    (
        "train_dataset_task: {type: x}",
        "train_dataset_task",
        {"type": "x"},
        ["remove it: train_dataset applies"],
    ),
    ("context: {enable_graph_kernel: maybe}", "context.enable_graph_kernel", "maybe", ["true or false or 'auto'"]),
    ("context: {max_device_memory: 58}", "context.max_device_memory", 58, ["a size such as 58GB"]),
    ("context: {max_device_memory: 58MB}", "context.max_device_memory", "58MB", ["a size such as 58GB"]),
    ("parallel: {parallel_mode: 2}", "parallel.parallel_mode", 2, ["0 or 1"]),
    ("recompute_config: {recompute: 3}", "recompute_config.recompute", 3, ["list of layer counts"]),
    ("recompute_config: {recompute: [-1]}", "recompute_config.recompute", [-1], ["list of layer counts"]),
    ("recompute_config: {recompute: [[1], 2]}", "recompute_config.recompute", [[1], 2], ["list of such lists"]),
    (
        "recompute_config: {select_recompute: {'a(': true}}",
        "recompute_config.select_recompute",
        {"a(": True},
        ["'a('", "not a regular expression"],
    ),
    (
        "recompute_config: {select_recompute: [a, 1]}",
        "recompute_config.select_recompute",
        ["a", 1],
        ["list of operator patterns"],
    ),
    ("callbacks: {type: MFLossMonitor}", "callbacks", {"type": "MFLossMonitor"}, ["a list"]),
    ("callbacks: [{type: LossMonitor}]", "callbacks.0.type", "LossMonitor", ["did you mean 'MFLossMonitor'?"]),
    ("callbacks: [{per_print_times: 1}]", "callbacks.0.type", None, ["required", "MFLossMonitor"]),
    (
        "callbacks: [{type: NaNMonitor, per_print_times: 1}]",
        "callbacks.0.per_print_times",
        1,
        ["a key of MFLossMonitor"],
    ),
    (
        "callbacks: [{type: CheckpointMonitor, prefix: a}]",
        "callbacks.0.prefix",
        "a",
        ["remove it: checkpoints are named"],
    ),
    ("runner_wrapper: {scale_sense: big}", "runner_wrapper.scale_sense", "big", ["a number"]),
    (
        "runner_wrapper: {scale_sense: {type: Dynamic}}",
        "runner_wrapper.scale_sense.type",
        "Dynamic",
        ["DynamicLossScaleUpdateCell"],
    ),
    (
        "runner_wrapper: {scale_sense: {scale_factor: 2}}",
        "runner_wrapper.scale_sense.type",
        None,
        ["required", "FixedLossScaleUpdateCell"],
    ),
    ("train_dataset: {data_loader: {config: {split: '9;1'}}}", "train_dataset.data_loader.config.split", "9;1", []),
    ("input_data: [1]", "input_data.0", 1, ["text"]),
]


@pytest.mark.parametrize(("line", "key", "value", "words"), FILE_FAULTS, ids=[fault[0] for fault in FILE_FAULTS])
def test_a_mistake_in_a_file(write, minimal, line, key, value, words):
    write(minimal, "base.yaml")
    path = write(f"{line}\nbase: base.yaml\n")
    with pytest.raises(UserError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.key) == (str(path), 1, key)
    assert problem.value == pytest.approx(value, nan_ok=True) if isinstance(value, float) else problem.value == value
    assert all(word in f"{problem.reason}; {problem.advice}" for word in words), problem
    assert str(caught.value) == f"{path}:1: {key}: {problem.message}"


# The option, the key and the value, and words of what the error says.
OPTION_FAULTS = [
    ("--seed=x", "seed", "x", ["must be an integer"]),
    ("--parallel_config.data_paralel=4", "parallel_config.data_paralel", 4, ["did you mean 'data_parallel'?"]),
    (
        "--lr_schedule.type=CosinWithWarmUpLR",
        "lr_schedule.type",
        "CosinWithWarmUpLR",
        ["did you mean 'CosineWithWarmUpLR'?"],
    ),
    ("--lr_schedule.num_cycles=3", "lr_schedule.num_cycles", 3, ["a key of CosineWithRestartsAndWarmUpLR"]),
    ("--model.model_config.batch_size=3", "model.model_config.batch_size", 3, ["write runner_config.batch_size"]),
    ("--model.model_config.num_hidden_layers=[]", "model.model_config.num_layers", [], ["an integer"]),
    ("--model.model_config.offset=[1.5]", "model.model_config.offset", [1.5], ["list with one per stage"]),
    (
        "--callbacks=[{type: NaNMonitor}, {type: NaNMonitor}]",
        "callbacks.1",
        {"type": "NaNMonitor"},
        ["stands in the list twice"],
    ),
    ("--seed={", "", None, ["not valid YAML"]),
    ("--num_train_epochs=3", "num_train_epochs", 3, ["not a key here", "write runner_config.epochs (--epochs)"]),
    ("--save_steps=3", "save_steps", 3, ["write callbacks.CheckpointMonitor.save_checkpoint_steps"]),
    (
        "--model_name_or_path=m",
        "model_name_or_path",
        "m",
        ["pass the model as the first argument: mindllm finetune MODEL DATA"],
    ),
    ("--seed='1'", "seed", "1", ["must be an integer", "write 1 without quotes"]),
    ("--use_parallel='True'", "use_parallel", "True", ["must be true or false", "write True without quotes"]),
    ("--seed=''", "seed", "", ["must be an integer"]),
    ("--seed.deeper=1", "seed", {"deeper": 1}, ["must be an integer"]),
]


@pytest.mark.parametrize(("option", "key", "value", "words"), OPTION_FAULTS, ids=[fault[0] for fault in OPTION_FAULTS])
def test_a_mistake_in_an_option(write, minimal, option, key, value, words):
    with pytest.raises(UserError) as caught:
        load_config(write(minimal), [option])
    problem = caught.value.problems[0]
    assert (problem.option, problem.key, problem.value) == (option, key, value)
    assert all(word in f"{problem.reason}; {problem.advice}" for word in words), problem


def test_options_have_two_dashes(refused):
    assert "seed=3: not an option" in refused("seed=3")


def test_no_such_entry_of_a_list(write, minimal):
    path = write({**minimal, "callbacks": [{"type": "MFLossMonitor"}]})
    with pytest.raises(UserError) as caught:
        load_config(path, ["--callbacks.CheckpointMonitor.save_checkpoint_steps=3"])
    assert caught.value.key == "callbacks.CheckpointMonitor"
    assert caught.value.advice == "it has 1: MFLossMonitor"


def test_all_mistakes_at_once_each_with_its_line(write):
    text = """\
seed: a
lr_schedule:
  type: ConstantWarmUpLR
  learning_rate: 1e-3
  seed: 3
model:
  model_config:
    hidden_size: 64
    num_layers: 8
    num_layers: 9
"""
    with pytest.raises(UserError) as caught:
        load_config(write(text))
    missing = {(7, f"model.model_config.{key}") for key in ("vocab_size", "num_heads", "seq_length")}
    said = [(1, "seed"), (5, "lr_schedule.seed"), (10, "model.model_config.num_layers"), *missing]
    found = [(problem.line, problem.key) for problem in caught.value.problems]
    assert sorted(found) == sorted(said), "values that follow from missing ones are not reported"


def test_a_duplicate_key_names_both_lines(write):
    with pytest.raises(UserError) as caught:
        load_config(write("seed: 1\nseed: 2\n"))
    assert (caught.value.line, caught.value.key) == (2, "seed")
    assert "also on line 1" in caught.value.first.message


def test_both_names_of_one_key(refused):
    message = refused("--model.model_config.theta=1", "--model.model_config.rope_theta=2")
    assert "--model.model_config.rope_theta=2: model.model_config.rope_theta: another name of" in message
    assert "model.model_config.theta" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: [1\nrun_mode: train", ":2: not valid YAML"),
        ("\tseed: 1", ":1: not valid YAML"),
        ("seed: 1\n\trun_mode: train", "; indent with spaces, not with tabs"),
        ("seed\uff1a 1\nrun_mode: train", ":2: not valid YAML"),
        ("seed\uff1a 1\n\nrun_mode: train", "; line 1: the colon is a full-width one; write ': '"),
        (
            "runner_config:\n  batch_size:2  # a row\n  epochs: 1",
            "; line 2: space missing after the colon; write batch_size: 2",
        ),
        (
            "runner_config:\n  epochs:2",
            "must be a section of keys (value epochs:2); space missing after the colon; write epochs: 2",
        ),
        ("runner_config:\n  epochs: 1\n   batch_size: 2", "not valid YAML"),
        ("runner_config:\n    epochs: 1\n  batch_size: 2", "; keys of one section begin in the same column"),
        ("seed: *seed", "; an anchor &name stands before its alias *name"),
        ("- 1\n- 2", "must be a mapping of keys to values, not list"),
        ("3", "must be a mapping of keys to values, not int"),
        ("seed: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("seed: !!python/name:os.getcwd ''", "not valid YAML"),
        ("seed: &a [*a]", "an alias is inside the value it refers to"),
        ("? [1, 2]\n: 3", "a key must be a word"),
        ("output_dir: !!timestamp 99999-99-99", "the tag !!timestamp is not allowed"),
        ("output_dir: !!binary aGFsbG8=", "the tag !!binary is not allowed"),
        ("seed: !!int ''", "'' is not a valid integer a machine computes with"),
        ("seed: 0x" + "f" * 900, "is not a valid integer a machine computes with"),
        ("seed: 1" + ":1" * 40_000, "is not a valid integer a machine computes with"),
        ("a: &a {<<: *a}", "an alias is inside the value it refers to"),
        ("a: {<<: 1}", "a merge key (<<) takes a mapping"),
        ("a: [" + "1," * 50_000 + "1]", "the file has more than 50,000 keys and values"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
                for old, new in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "aliases (*name) describe more than 50,000 values",
        ),
        ("", "holds no keys; write at least `base:`"),
        ("# to do", "holds no keys; write at least `base:`"),
    ],
)
def test_broken_files(refused, text, expected):
    assert expected in refused(text=text)


def test_files_that_cannot_be_read(tmp_path, write, minimal):
    path = write(minimal, "run.yaml")
    for wrong, expected in [
        (tmp_path / "rum.yaml", "no such file; did you mean 'run.yaml'?"),
        ("llama2_13b", "no such file; did you mean configs/llama2/pretrain_llama2_13b.yaml?"),
        (tmp_path, "is a directory, not a file; name a YAML in it: run.yaml"),
    ]:
        with pytest.raises(UserError, match=expected.replace("?", r"\?")):
            load_config(wrong)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file in UTF-8"):
        load_config(path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("b.yaml", "a.yml"), "is a directory, not a file; name a YAML in it: one of a.yml, b.yaml"),
        (("config.yaml", "other.yaml"), "is a directory, not a file; of a run name its YAML: {}/config.yaml"),
        ((), "is a directory, not a file, and holds neither a YAML nor a model (config.json)"),
        ([f"{n:02}.yaml" for n in range(10)], "04.yaml, 05.yaml, 06.yaml, 07.yaml and 2 more"),
    ],
)  # fmt: skip
def test_a_directory_says_which_file_of_it_to_name(tmp_path, files, said):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError) as found:
        load_config(tmp_path)
    assert said.format(tmp_path) in str(found.value)


def test_the_directory_of_a_run_holds_the_file_that_is_named():
    from mindllm.config.reading.load import RESOLVED
    from mindllm.run import training

    assert training.RESOLVED is RESOLVED


@pytest.mark.parametrize(
    ("text", "key", "advice"),
    [
        ("load_checkpoint: None", "load_checkpoint", "write '' for nothing"),
        ("load_checkpoint: null", "load_checkpoint", "write '' for nothing"),
        ("processor: {tokenizer: {vocab_file: None}}", "processor.tokenizer.vocab_file", "write '' for nothing"),
        ("train_dataset: {data_loader: {config: {data_path: None}}}", "train_dataset.data_loader.config.data_path", "write"),
        ("runner_config: {train_steps: None}", "runner_config.train_steps", "write null for nothing"),
        ("seed: None", "seed", ""),
    ],
)  # fmt: skip
def test_none_is_a_text(write, minimal, text, key, advice):
    write(minimal, "base.yaml")
    with pytest.raises(UserError) as found:
        load_config(write(f"{text}\nbase: base.yaml\n", "run.yaml"))
    (problem,) = found.value.problems
    assert (problem.key, problem.line) == (key, 1)
    assert problem.advice.startswith(advice)
    assert bool(problem.advice) == bool(advice)


def test_a_prompt_may_be_that_word(write, minimal):
    write(minimal, "base.yaml")
    assert load_config(write("input_data: None\nbase: base.yaml\n", "run.yaml")).input_data == "None"


def test_a_base_that_is_not_there(refused):
    message = refused(text="seed: 1\nbase: bass.yaml\n")
    assert ":2: base: " in message
    assert "bass.yaml: no such file" in message


def test_a_base_that_is_not_a_path(refused):
    assert ":1: base: must be the path of a YAML file" in refused(text="base: 3\n")


def test_files_based_on_each_other(write):
    write("base: two.yaml\n", "one.yaml")
    with pytest.raises(UserError, match=r"one\.yaml:1: base: two\.yaml is based on this file in turn"):
        load_config(write("base: one.yaml\n", "two.yaml"))


def test_a_mistake_in_the_base_names_the_base(write, minimal):
    base = write({**minimal, "seeds": 1}, "base.yaml")
    with pytest.raises(UserError) as caught:
        load_config(write("base: base.yaml\n"))
    assert str(caught.value).startswith(f"{base}:")


def test_merge_keys_are_bounded_by_the_values_they_describe(refused):
    pairs, sources = ", ".join(f"k{number}: 1" for number in range(300)), ", ".join(["*x"] * 300)
    assert "aliases (*name) describe more than 50,000 values" in refused(
        text=f"x: &x {{{pairs}}}\ny: {{<<: [{sources}]}}"
    )


def test_the_first_merged_mapping_wins_and_own_keys_win_over_both(write):
    text = "a: &a {k: 1, l: 1}\nb: &b {k: 2, m: 2}\nc: {m: 3, <<: [*a, *b]}\nd: {<<: *a, k: 4}\ne: [<<, =]"
    data = read_file(write(text)).data
    assert (data["c"], data["d"], data["e"]) == ({"k": 1, "l": 1, "m": 3}, {"k": 4, "l": 1}, ["<<", "="])


@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "of MindFormers"])
def test_suggestions_are_sought_for_the_mistakes_that_are_shown(refused, monkeypatch, theirs):
    start = "use_parallel: true\nauto_tune: 1\nsrc_strategy_path_or_dir: ''\nrunner_config: {sink_mode: true}\n"
    searched = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda *given, **options: searched.append(given) or [])
    message = refused(text=start * theirs + "".join(f"k{number}: 1\n" for number in range(2000)))
    assert "more mistakes" in message
    assert len(message.splitlines()) == MOST_SHOWN + 1
    assert len(searched) <= 3 * MOST_SHOWN  # each of two, and a key that was meant


def test_at_most_five_keys_are_suggested_nearest_first(refused):
    message = refused("--parallel_confg.zzzzz=1", "--trainer.qqqq=1")
    assert "did you mean 'parallel_config'?" in message
    assert all(line.count(", ") <= 4 for line in message.splitlines())
    assert few(["a", "b", "word", "d", "e", "words", "g"], "words").startswith("words, word, ")
    assert few(["a", "b"], "b") == "a, b"


def test_all_mistakes_of_a_file_come_together(refused):
    text = (
        "sed: 4\noutput_dir: 3\nparallel_config: {data_paralel: 2}\nrun_mode: predict\n"
        "model: {model_config: {vocab_size: 96, hidden_size: 64, num_layers: 8, num_heads: 8, seq_length: 32,"
        " eos_token_id: 97, expert_num: 4, n_group: 3, head_dim: 9}}\n"
    )
    lines = refused(text=text).splitlines()
    expected = {"sed": 1, "output_dir": 2, "parallel_config.data_paralel": 3}
    expected |= {f"model.model_config.{key}": 5 for key in ("eos_token_id", "n_group", "head_dim")}
    for key, line in expected.items():
        assert any(f"run.yaml:{line}: {key}: " in shown for shown in lines), (key, lines)


def test_a_wrong_value_brings_no_mistakes_of_what_follows_from_it(refused):
    lines = refused("--lr_schedule.learning_rate=fast", "--lr_schedule.lr_end=1").splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["--lr_schedule.learning_rate=fast"]


def test_unknown_keys_can_be_ignored_and_are_named(write, minimal, caplog):
    write(minimal, "base.yaml")
    path = write("base: base.yaml\nsed: 4\nparallel_config: {enable_fa_var_len: true}\nfuture: {a: 1, b: [2]}\n")
    config = load_config(path, ["--ignore-unknown-keys", "--seed=7"])
    assert config == load_config(write(minimal, "minimal.yaml"), ["--seed=7"])
    named = [record.message for record in caplog.records]
    assert sorted(message.partition(": unknown")[0] for message in named) == [
        f"{path}:2: sed",
        f"{path}:3: parallel_config.enable_fa_var_len",
        f"{path}:4: future",
    ]
    assert load_config(path, {"ignore_unknown_keys": True}).seed == 42
    for overrides in ([], ["--ignore-unknown-keys=false"], ["--ignore-unknown-keys", "--sed=7"]):
        with pytest.raises(UserError, match="sed: unknown key"):
            load_config(path, overrides)
