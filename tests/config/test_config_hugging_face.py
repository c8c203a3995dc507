"""A run takes what its YAML leaves out from a Hugging Face directory, and contradictions and what is not a Llama are told."""

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindllm.config import ModelConfig, config_json, load_config, override_config, read_model_config, render_config
from mindllm.errors import UserError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 160,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.fixture
def directory(tmp_path):
    """A directory with the ``config.json`` of a Llama; a test may change it."""
    path = tmp_path / "hf"
    path.mkdir()
    write_config(path)
    return path


def write_config(directory, **changes):
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))


@pytest.fixture
def load_without_sizes(tmp_path, minimal):
    """Loads a run whose YAML says nothing of the architecture."""

    def load(*options):
        bare = {**minimal, "model": {"model_config": {"seq_length": 32}}}
        (tmp_path / "bare.yaml").write_text(yaml.safe_dump(bare))
        return load_config(tmp_path / "bare.yaml", options)

    return load


@pytest.mark.parametrize("key", ["load_checkpoint", "pretrained_model_dir"])
def test_what_is_left_out_is_the_directory_s(directory, load_without_sizes, key):
    (directory / "tokenizer.json").write_text("{}")
    config = load_without_sizes(f"--{key}={directory}")
    model = config.model.config
    assert (model.num_layers, model.n_kv_heads, model.head_dim, model.rms_norm_eps) == (3, 2, 8, 1e-5)
    assert (model.seq_length, model.max_position_embedding) == (32, 256)
    assert config.processor.tokenizer.vocab_file == str(directory / "tokenizer.json")


def test_no_model_section_is_needed(directory, tmp_path, minimal):
    del minimal["model"]
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(minimal))
    config = load_config(tmp_path / "bare.yaml", [f"--load_checkpoint={directory}"])
    assert config.model.config.seq_length == 256
    write_config(directory, max_position_embeddings=131072)
    assert load_config(tmp_path / "bare.yaml", [f"--load_checkpoint={directory}"]).model.config.seq_length == 4096


def test_the_tokenizer_and_the_end_of_text_that_are_given_are_kept(directory, load_without_sizes):
    (directory / "tokenizer.json").write_text("{}")
    options = ("--processor.tokenizer.vocab_file=mine.json", "--model.model_config.eos_token_id=3")
    write_config(directory, eos_token_id=2)
    config = load_without_sizes(f"--load_checkpoint={directory}", *options)
    assert config.processor.tokenizer.vocab_file == "mine.json"
    assert config.model.config.eos_token_ids == (3,)


def test_what_is_resolved_reads_back_and_can_be_overridden(directory, load_without_sizes, tmp_path):
    write_config(directory, rope_scaling={"type": "linear", "factor": 2.0}, eos_token_id=[1, 2])
    config = load_without_sizes(f"--load_checkpoint={directory}")
    (tmp_path / "rendered.yaml").write_text(render_config(config))
    assert load_config(tmp_path / "rendered.yaml") == config
    assert override_config(config, {"seed": 3}).model == config.model
    smaller = override_config(config, {"load_checkpoint": "", "model.model_config.num_layers": 1})
    assert smaller.model.config.num_layers == 1


@pytest.mark.parametrize(
    ("option", "theirs"),
    [
        ("num_layers=4", "num_hidden_layers of {file}, which is 3 (value 4)"),
        ("n_kv_heads=8", "num_key_value_heads of {file}, which is 2 (value 8)"),
        ("head_dim=16", "head_dim of {file}, which is 8 (value 16)"),
        ("theta=5e5", "rope_theta of {file}, which is 10000.0 (value 500000.0)"),
        ("tie_word_embeddings=true", "tie_word_embeddings of {file}, which is False (value True)"),
        ("qkv_has_bias=true", "attention_bias of {file}, which is False (value True)"),
        ("rope_scaling={type: linear, factor: 2.0}", "rope_scaling of {file}, which is None"),
    ],
)
def test_contradictions_name_both_places_and_values(directory, load_without_sizes, option, theirs):
    key = option.partition("=")[0]
    with pytest.raises(UserError) as error:
        load_without_sizes(f"--load_checkpoint={directory}", f"--model.model_config.{option}")
    wanted = f"--model.model_config.{option}: model.model_config.{key}: contradicts "
    assert str(error.value).startswith(wanted + theirs.format(file=directory / "config.json"))


def test_equal_values_are_no_contradiction(directory, load_without_sizes):
    write_config(directory, rope_parameters={"rope_type": "llama3", "rope_theta": 500000, **SCALED})
    given = "--model.model_config.rope_scaling={type: llama3, factor: 8, original_max_position_embeddings: 64}"
    config = load_without_sizes(f"--load_checkpoint={directory}", given, "--model.model_config.theta=5e5")
    assert config.model.config.rope_scaling.low_freq_factor == 1.0


def test_old_and_new_layouts_of_the_rotary_positions_are_the_same(directory):
    layouts = (
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALED}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALED}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALED}},
    )
    found = []
    for layout in layouts:
        write_config(directory, **layout)
        found.append(read_model_config(directory))
    assert found[0] == found[1] == found[2]
    assert (found[0].theta, found[0].rope_scaling.factor) == (5e5, 8.0)


def test_defaults_are_those_of_transformers(directory):
    transformers = pytest.importorskip("transformers")
    sizes = {key: LLAMA[key] for key in list(LLAMA)[:6]}
    (directory / "config.json").write_text(json.dumps(sizes))
    ours, theirs = read_model_config(directory), transformers.LlamaConfig(**sizes)
    assert ours.n_kv_heads == theirs.num_key_value_heads
    assert (ours.rms_norm_eps, ours.max_position_embedding) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (ours.theta, ours.rope_scaling) == (theirs.rope_parameters["rope_theta"], None)
    assert (ours.tie_word_embeddings, ours.qkv_has_bias) == (theirs.tie_word_embeddings, theirs.attention_bias)


def test_the_ends_of_a_text_are_those_of_both_files(directory):
    write_config(directory, eos_token_id=1)
    assert read_model_config(directory).eos_token_ids == (1,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_model_config(directory).eos_token_ids == (7, 8, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "model_type: this model is not supported (value bert); supported: llama, qwen2, "),
        ({"hidden_act": "gelu"}, "hidden_act: this model is not supported (value gelu)"),
        ({"mlp_bias": True}, "mlp_bias: this model is not supported (value True)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method: missing"),
        ({"num_hidden_layers": None, "vocab_size": None}, "vocab_size, num_hidden_layers: missing"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers: "),
        ({"num_hidden_layers": 0}, "num_hidden_layers: "),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: "),
        ({"max_position_embeddings": "long"}, "max_position_embeddings: "),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling.rope_type: not supported (value longrope)",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling.yarn.factor: Field required"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
            "rope_scaling.truncate: not supported (value False)",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling: must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: must be 1 (value 0.5)"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_file_and_key(directory, changes, words):
    write_config(directory, **changes)
    with pytest.raises(UserError) as error:
        read_model_config(directory)
    assert str(error.value).startswith(f"{directory / 'config.json'}: ")
    assert words in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000, "\xff"])
def test_a_file_that_is_no_json(directory, content):
    (directory / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"config\.json: (not JSON|holds no object)"):
        read_model_config(directory)


def test_directories_that_are_not_there(load_without_sizes, load, tmp_path):
    with pytest.raises(UserError, match=r"pretrained_model_dir: not a Hugging Face directory, it has no config.json"):
        load(f"--pretrained_model_dir={tmp_path}")
    with pytest.raises(UserError, match=r"load_checkpoint: does not exist.*\(value nowhere\)"):
        load_without_sizes("--load_checkpoint=nowhere")
    with pytest.raises(UserError, match=r"pretrained_model_dir: does not exist.*\(value nowhere\)"):
        load_without_sizes("--pretrained_model_dir=nowhere")
    for key in ("load_checkpoint", "pretrained_model_dir"):
        assert load(f"--{key}=nowhere").model.config.num_layers == 8, "it may be made before the run"


def test_sections_that_are_no_sections_are_told_by_the_schema(directory, refused, minimal):
    minimal["model"] = {"model_config": 3}
    message = refused(f"--load_checkpoint={directory}", text=yaml.safe_dump(minimal))
    assert "model.model_config: must be a section of keys" in message


ROPES = st.none() | st.sampled_from([{"type": "linear", "factor": 3.0}, {"type": "llama3", "factor": 2.0}])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    head_dim=st.sampled_from([8, 16]),
    theta=st.floats(1.0, 1e9),
    rope=ROPES,
    flags=st.tuples(st.booleans(), st.booleans()),
    eos=st.none() | st.integers(0, 90) | st.lists(st.integers(0, 90), min_size=2, max_size=3),
)
def test_what_is_written_is_read_back(directory, heads, head_dim, theta, rope, flags, eos):
    fields = {"vocab_size": 96, "hidden_size": 48, "num_layers": 2, "intermediate_size": 100, "seq_length": 64}
    fields |= {
        "num_heads": heads[0],
        "n_kv_heads": heads[1],
        "head_dim": head_dim,
        "theta": theta,
        "rope_scaling": rope,
    }
    biases = {"qkv_has_bias": flags[0], "attn_proj_has_bias": flags[0], "tie_word_embeddings": flags[1]}
    model = ModelConfig(**fields, **biases, eos_token_id=eos)
    content = config_json(model, "float32", {**TOKENS, "eos_token_id": eos})
    (directory / "config.json").write_text(json.dumps(content))
    assert read_model_config(directory) == model


@pytest.mark.parametrize("tree", [{}, {"model": {"model_config": {"num_layers": 2}}}])
def test_what_a_directory_that_is_not_there_was_to_give_is_told_once(tree):
    with pytest.raises(UserError) as caught:
        load_config({"load_checkpoint": "models/nowhere", "run_mode": "predict", **tree})
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("load_checkpoint", "models/nowhere")
    assert problem.advice.startswith("it was to give the architecture")


GENERATION = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("content", "options", "expected", "line"),
    [
        (GENERATION, (), (False, 0.6, 0), "greedy (do_sample: false; temperature 0.6, top_p 0.9 without effect)"),
        (
            {**GENERATION, "do_sample": True},
            (),
            (True, 0.6, 50),
            "sampling (do_sample: true), temperature 0.6, top_k 50",
        ),
        (
            {**GENERATION, "do_sample": True, "top_k": 20},
            ("--generation.temperature=1.2",),
            (True, 1.2, 20),
            "temperature 1.2, top_k 20, top_p 0.9, repetition_penalty 1.1",
        ),
        ({"temperature": 0.0, "do_sample": False}, (), (False, 1.0, 0), "greedy (do_sample: false)"),
    ],
)
def test_generation_follows_the_file_of_the_model(
    directory, load_without_sizes, caplog, content, options, expected, line
):
    (directory / "generation_config.json").write_text(json.dumps(content))
    options = (*options, "--processor.tokenizer.vocab_file=mine.json", "--input_data=text")
    config = load_without_sizes(f"--load_checkpoint={directory}", "--run_mode=predict", *options)
    found = config.generation
    assert (found.do_sample, found.temperature, found.top_k) == expected
    assert line in found.describe()
    assert ("no_repeat_ngram_size" in caplog.text) == ("no_repeat_ngram_size" in content)
    trained = load_without_sizes(f"--load_checkpoint={directory}", "--run_mode=finetune")
    assert trained.generation.temperature == 1.0, "only what writes text follows it"
