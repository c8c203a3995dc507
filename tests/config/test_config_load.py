"""Reading: base files, overrides, synonyms, numbers, derived values."""

import pytest

from mindllm.config import RunConfig, load_config, override_config, render_config
from mindllm.config.reading.overrides import SHORTHANDS
from mindllm.errors import UserError


def test_the_smallest_run_fills_in_what_follows_from_other_values(load):
    model = load().model.config
    assert (model.n_kv_heads, model.head_dim, model.intermediate_size, model.max_position_embedding) == (8, 8, 256, 32)


def test_null_asks_for_the_default_of_a_derived_value(load):
    assert load("--model.model_config.n_kv_heads=null").model.config.n_kv_heads == 8


def test_a_file_changes_its_base_key_by_key(write, minimal):
    write(minimal, "base.yaml")
    (write("", "unused.yaml").parent / "deeper").mkdir()
    path = write("base: ../base.yaml\nmodel:\n  model_config:\n    num_layers: 2\n", "deeper/run.yaml")
    model = load_config(path).model.config
    assert (model.num_layers, model.hidden_size) == (2, 64)


def test_a_list_replaces_that_of_the_base(write, minimal):
    write({**minimal, "callbacks": [{"type": "NaNMonitor"}, {"type": "MFLossMonitor"}]}, "base.yaml")
    config = load_config(write("base: base.yaml\ncallbacks: [{type: MetricsMonitor}]\n"))
    assert [callback.type for callback in config.callbacks] == ["MetricsMonitor"]


def test_a_section_whose_type_changes_starts_afresh(write, minimal):
    minimal["lr_schedule"]["lr_end"] = 1e-4
    write(minimal, "base.yaml")
    config = load_config(write("base: base.yaml\nlr_schedule: {type: ConstantWarmUpLR, learning_rate: 0.5}\n"))
    assert (config.lr_schedule.type, config.lr_schedule.learning_rate) == ("ConstantWarmUpLR", 0.5)


def test_the_empty_section_is_that_of_the_defaults(write, minimal):
    assert load_config(write({**minimal, "generation": None})).generation.max_new_tokens == 128


@pytest.mark.parametrize("written", ["1e-5", "1E-5", "1.e-5", ".00001", "0.00001", "+1e-5", "10.0e-6"])
def test_numbers_as_people_write_them(load, written):
    assert load(f"--model.model_config.rms_norm_eps={written}").model.config.rms_norm_eps == 1e-5


def test_an_integer_is_a_number(load):
    assert load("--model.model_config.theta=500000").model.config.theta == 500000.0


def test_hugging_face_names(load):
    model = load("--model.model_config.num_key_value_heads=4", "--model.model_config.rope_theta=5e5").model.config
    assert (model.n_kv_heads, model.theta) == (4, 5e5)


def test_hugging_face_names_change_the_base_under_their_own_name(write, minimal):
    write(minimal, "base.yaml")
    text = """
base: base.yaml
model:
  model_config:
    num_hidden_layers: 3
    rope_scaling: {rope_type: llama3, factor: 8}
"""
    model = load_config(write(text)).model.config
    assert (model.num_layers, model.rope_scaling.type, model.rope_scaling.factor) == (3, "llama3", 8.0)


def test_anchors_and_merge_keys(write, minimal):
    text = "x: 1"
    text = """
lr_schedule: &rate {type: CosineWithWarmUpLR, learning_rate: 1e-3}
model:
  model_config: {vocab_size: 96, hidden_size: 64, num_layers: 8, num_heads: 8, seq_length: 32}
train_dataset: {data_loader: {config: {data_path: x}}}
"""
    base = load_config(write(text))
    merged = text.replace("lr_schedule: &rate", "lr_schedule:\n  <<: &rate") + ""
    merged = merged.replace("learning_rate: 1e-3}", "learning_rate: 1e-3}\n  learning_rate: 2e-3")
    assert base.lr_schedule.learning_rate == 1e-3
    assert load_config(write(merged)).lr_schedule.learning_rate == 2e-3


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (["--resume_training"], True),
        (["--resume_training", "--seed=1"], True),
        (["--resume_training=True"], True),
        (["--resume_training", "false"], False),
        (["--resume_training=output/checkpoint/step_3"], "output/checkpoint/step_3"),
    ],
)
def test_flags_and_values(load, options, value):
    assert load(*options).resume_training == value


@pytest.mark.parametrize(
    ("shorthand", "value"),
    [
        ("epochs", "3"),
        ("batch_size", "3"),
        ("gradient_accumulation_steps", "3"),
        ("train_dataset_dir", "a/b"),
        ("device_target", "Ascend"),
        ("device_id", "3"),
        ("predict_data", "a: b"),
        ("do_sample", "true"),
    ],
)
def test_shorthands_are_read_wherever_options_are(load, shorthand, value):
    key = SHORTHANDS[shorthand]
    changed = load(f"--{key}={value}")
    assert changed != load()
    assert load(f"--{shorthand}={value}") == load(f"--{shorthand}", value) == changed


def test_an_error_names_the_shorthand_and_its_key(load):
    with pytest.raises(UserError, match=r"--batch_size=x: runner_config\.batch_size: must be an integer"):
        load("--batch_size=x")


def test_no_shorthand_hides_a_key():
    assert not {*SHORTHANDS} & {*RunConfig.model_fields}


@pytest.mark.parametrize("prompt", ["def f(x):", "{", "# a comment", "2024", "a: b", "yes", "- x", "*x", "[1, x"])
def test_a_prompt_needs_no_quotes(load, prompt):
    assert load(f"--input_data={prompt}").input_data == prompt


def test_prompts_as_a_list_and_in_quotes(load):
    assert load('--input_data=["a", "b"]').input_data == ("a", "b")
    assert load('--input_data="a b"').input_data == "a b"


def test_entries_of_a_list_go_by_type_and_by_number(write, minimal):
    callbacks = [{"type": "MFLossMonitor"}, {"type": "CheckpointMonitor", "keep_checkpoint_max": 2}]
    path = write({**minimal, "callbacks": callbacks})
    options = ["--callbacks.CheckpointMonitor.save_checkpoint_steps=7", "--callbacks.0.per_print_times", "3"]
    loss, checkpoint = load_config(path, options).callbacks
    assert (loss.per_print_times, checkpoint.save_checkpoint_steps, checkpoint.keep_checkpoint_max) == (3, 7, 2)


def test_the_last_option_wins(load):
    assert load("--seed=1", "--seed=2").seed == 2


def test_overrides_as_a_mapping_are_values(write, minimal):
    config = load_config(write(minimal), {"parallel.parallel_mode": "data_parallel", "recompute_config.recompute": [3]})
    assert (config.parallel.parallel_mode, config.recompute_config.recompute) == (0, (3,))


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_a_text_that_no_yaml_holds_is_no_override_either(write, minimal, text):
    with pytest.raises(
        UserError, match=r"trainer\.model_name: a text with a null character or half of a surrogate pair"
    ):
        load_config(write(minimal), {"trainer.model_name": text})
    with pytest.raises(UserError, match="input_data: a text with a null character"):
        load_config(write(minimal), {"input_data": ["fine", text]})


def test_changing_a_loaded_run_works_derived_values_out_again(load):
    config = override_config(load(), {"model.model_config.num_heads": 4})
    assert (config.model.config.n_kv_heads, config.model.config.head_dim) == (4, 16)
    assert config.source is not None


def test_global_batch_size_counts_replicas_accumulation_and_micro_batches(load):
    sizes = "--parallel_config={data_parallel: 4, pipeline_stage: 2, micro_batch_num: 3}"
    assert load("--use_parallel", sizes, "--runner_config.batch_size=2").global_batch_size == 2 * 4 * 3
    assert load("--runner_config={batch_size: 2, gradient_accumulation_steps: 5}").global_batch_size == 10


def test_an_error_found_later_names_the_place(load):
    config = load("--model.model_config.vocab_size=100")
    error = config.error("model.model_config.vocab_size", "the tokenizer has 120 tokens (value 100)")
    assert isinstance(error, UserError)
    assert str(error).startswith("--model.model_config.vocab_size=100: model.model_config.vocab_size: the tokenizer")
    assert f"{config.source}:2: model.model_config" in str(config.error("model.model_config.offset", "x"))


def test_the_configuration_cannot_be_changed_in_place(load):
    with pytest.raises(ValueError, match="frozen"):
        load().seed = 3


def test_a_data_loader_of_another_type_starts_afresh_over_a_base_that_leaves_the_type_out(write, minimal):
    minimal["train_dataset"]["data_loader"]["config"]["eod_mask_loss"] = True
    minimal["processor"] = {"tokenizer": {"vocab_file": "tokenizer.json"}}
    write(minimal, "base.yaml")
    loader = "{type: CommonDataLoader, config: {data_path: rows.jsonl}}"
    config = load_config(write(f"base: base.yaml\ntrain_dataset: {{data_loader: {loader}}}\n"))
    assert config.train_dataset.data_loader.config.data_path == "rows.jsonl"
    kept = load_config(write("base: base.yaml\ntrain_dataset: {data_loader: {config: {split: '1'}}}\n"))
    assert kept.train_dataset.data_loader.config.eod_mask_loss


def test_options_change_an_entry_of_the_default_callbacks(load):
    config = load(
        "--callbacks.CheckpointMonitor.save_checkpoint_steps=7", "--callbacks.MFLossMonitor.per_print_times=3"
    )
    found = {callback.type: callback for callback in config.callbacks}
    assert found["CheckpointMonitor"].save_checkpoint_steps == 7
    assert found["MFLossMonitor"].per_print_times == 3
    assert [callback.type for callback in config.callbacks] == [callback.type for callback in load().callbacks]


def test_only_training_needs_a_learning_rate(write, minimal):
    del minimal["lr_schedule"]
    minimal["processor"] = {"tokenizer": {"vocab_file": "tokenizer.json"}}
    assert load_config(write(minimal), ["--run_mode=predict"]).lr_schedule is None
    with pytest.raises(UserError, match="lr_schedule: this key is required"):
        load_config(write(minimal))


def test_a_base_with_a_schedule_needs_its_rate_only_to_train(write, minimal):
    del minimal["lr_schedule"]["learning_rate"]
    minimal["processor"] = {"tokenizer": {"vocab_file": "tokenizer.json"}}
    write(minimal, "base.yaml")
    for mode in ("predict", "chat", "eval"):
        assert load_config(write("base: base.yaml\n"), [f"--run_mode={mode}"]).lr_schedule.learning_rate is None
    for mode in ("train", "finetune"):
        with pytest.raises(UserError, match=rf"base.yaml:\d+: lr_schedule.learning_rate: .* run_mode {mode} needs"):
            load_config(write("base: base.yaml\n"), [f"--run_mode={mode}", "--load_checkpoint=x"])


COMMENTED = """# about the file
base: base.yaml
seed: 3  # a lucky number
# why the output
# is elsewhere
output_dir: 'a # b'
runner_config:  # how long
  epochs: 2 # twice

  # not about the next key

  batch_size: 4
input_data: ["a # b", c]   # two prompts
generation: {top_k: 3, top_p: 0.5}  # of both
trainer: {
  model_name: x}
"""


def test_the_resolved_yaml_can_keep_comments(write, minimal):
    write(minimal, "base.yaml")
    config = load_config(write(COMMENTED), ["--runner_config.epochs=5"])
    text = render_config(config, commented=True)
    for line in (
        "seed: 3  # a lucky number",
        "# why the output is elsewhere",
        "# how long",
        "# two prompts",
        "# of both",
    ):
        assert line in text
    assert "  epochs: 5\n" in text  # given by an option, not for the reason in the file
    assert "about" not in text
    assert load_config(write(text)) == config
    assert render_config(config) == render_config(load_config(write(render_config(config))))
