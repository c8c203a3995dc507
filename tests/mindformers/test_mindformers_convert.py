"""A YAML of MindFormers loads as it is: every key has an outcome, and what it becomes is what MindFormers computes."""

import copy
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindllm.config import load_config, render_config
from mindllm.config.reading.document import Document, leaves
from mindllm.config.reading.load import build_config, read_file
from mindllm.config.reading.shorten import short_yaml, write_short
from mindllm.errors import UserError
from mindllm.mindformers.reader import KEYS, convert, is_mindformers
from mindllm.mindformers.reading import Outcome
from tests.mindformers.mindformers_files import LEGACY, MCORE, changed, writer

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = "model.model_config"


@pytest.fixture
def theirs(tmp_path):
    """Writes a file of MindFormers."""
    return writer(tmp_path)


@pytest.fixture
def load(theirs):
    """Loads a changed file."""
    return lambda tree=LEGACY, changes=None, *options: load_config(theirs(tree, changes), options)


@pytest.fixture
def account(theirs):
    """The entries of a changed file by key."""

    def entries(tree=LEGACY, changes=None, *options):
        conversion = convert(read_file(theirs(tree, changes)), options)
        return {entry.key: entry for entry in conversion.entries}

    return entries


@pytest.mark.parametrize("tree", [LEGACY, MCORE], ids=["legacy", "mcore"])
def test_every_key_has_an_outcome(account, tree):
    entries = account(tree)
    assert {entry.path for entry in entries.values()} >= {path for path, _ in leaves(tree)}
    assert not [entry for entry in entries.values() if entry.outcome is Outcome.REFUSED]
    for entry in entries.values():
        assert entry.reason or entry.outcome in (Outcome.USED, Outcome.TRANSLATED), entry
        assert entry.becomes or entry.outcome is not Outcome.TRANSLATED, entry


def test_a_legacy_run_is_what_mindformers_computes(load):
    config = load()
    model = config.model.config
    assert (model.hidden_size, model.num_layers, model.intermediate_size) == (4096, 32, 11008)
    assert (model.initializer_range, model.param_init_type, model.compute_dtype) == (0.01, "float16", "bfloat16")
    assert (config.optimizer.betas, config.optimizer.weight_decay) == ((0.9, 0.95), 0.0)
    assert not config.optimizer.bias_correction
    assert config.global_batch_size == 64
    assert config.runner_wrapper.scale_sense.loss_scale_value == 65536
    assert [callback.type for callback in config.callbacks] == ["MFLossMonitor", "CheckpointMonitor"]
    assert config.context.device_target == "Ascend"
    assert config.train_dataset.data_loader.type == "MindDataset"


@pytest.mark.parametrize(
    ("tree", "key", "kind", "reason"),
    [
        (LEGACY, "param_init_type", "bfloat16", "moments and the update are float32"),
        (LEGACY, "param_init_type", "float32", ""),
        (MCORE, "params_dtype", "bfloat16", "in MindFormers params_dtype"),
    ],
)
def test_parameters_keep_their_type_and_a_row_says_what_differs(account, load, tree, key, kind, reason):
    changes = {f"model.model_config.{key}": kind}
    entry = account(tree, changes)[f"model.model_config.{key}"]
    assert reason in entry.reason
    assert bool(entry.reason) == bool(reason)
    assert load(tree, changes).model.config.param_init_type == kind


@pytest.mark.parametrize(
    ("kind", "reason"), [("bfloat16", "has param_init_type float16 here"), ("float16", "param_init_type")]
)
def test_an_embedding_of_another_type_is_said(account, kind, reason):
    entry = account(LEGACY, {"model.model_config.embedding_init_type": kind})["model.model_config.embedding_init_type"]
    assert entry.outcome is Outcome.WITHOUT_EFFECT
    assert reason in entry.reason


def test_parameters_of_llama_are_float16_where_nothing_is_written(account):
    entry = account(LEGACY, {"model.model_config.param_init_type": ...})["model.model_config.param_init_type"]
    assert entry.becomes == "model.model_config.param_init_type: float16"


def test_mcore_names_are_ours(load):
    config = load(MCORE)
    model = config.model.config
    assert (model.num_layers, model.num_heads, model.n_kv_heads, model.theta) == (32, 32, 8, 1e6)
    assert config.recompute_config.select_recompute == (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
    assert not config.parallel.full_batch
    assert config.parallel.dataset_strategy is None
    assert config.runner_config.train_steps == 8000 // 8 * 2
    assert config.train_dataset.data_loader.config.weights == (1.0,)


@pytest.mark.parametrize(
    ("key", "value", "ours", "expected"),
    [
        ("micro_batch_interleave_num", 2, "runner_config.batch_size", 2),
        ("parallel_config.context_parallel", 2, "parallel_config.context_parallel", 2),
        (
            "parallel_config.context_parallel_algo",
            "hybrid_cp",
            "parallel_config.context_parallel_algo",
            "colossalai_cp",
        ),
        ("runner_config.gradient_accumulation_steps", 4, "runner_config.gradient_accumulation_steps", 4),
        ("parallel_config.micro_batch_num", 4, "parallel_config.micro_batch_num", 1),
        ("parallel.parallel_mode", 0, "parallel.parallel_mode", 1),
        ("parallel.gradients_mean", True, "parallel.gradients_mean", False),
        ("lr_schedule.type", "polynomial", "lr_schedule.type", "PolynomialWithWarmUpLR"),
        ("runner_wrapper.scale_sense.scale_factor", 1, "runner_wrapper.scale_sense.type", "FixedLossScaleUpdateCell"),
        (f"{MODEL}.n_kv_heads", 8, "model.config.n_kv_heads", 8),
        (f"{MODEL}.fp32_residual_connection", True, "model.config.fp32_residual_connection", True),
        (f"{MODEL}.res_dtype", "float32", "model.config.fp32_residual_connection", True),
        (f"{MODEL}.residual_dtype", "bfloat16", "model.config.fp32_residual_connection", False),
        (f"{MODEL}.extend_method", "PI", "model.config.rope_scaling", None),
        (f"{MODEL}.pp_interleave_num", 2, "model.config.pp_interleave_num", 1),
        (f"{MODEL}.offset", [0, 1], "model.config.offset", 0),
        (f"{MODEL}.max_position_embedding", 2048, "model.config.max_position_embedding", 4096),
        (f"{MODEL}.do_sample", True, "generation.top_k", 3),
        ("run_mode", "finetune", "run_mode", "train"),
        (
            "train_dataset.data_loader.dataset_dir",
            "a.mindrecord",
            "train_dataset.data_loader.config.data_path",
            "a.mindrecord",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_translated(load, key, value, ours, expected):
    found = load(LEGACY, {key: value})
    for part in ours.split("."):
        found = getattr(found, part)
    assert found == expected


def test_the_width_of_70b_is_that_of_mindformers(load):
    sizes = {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3}
    config = load(LEGACY, {f"{MODEL}.{key}": value for key, value in sizes.items()})
    assert config.model.config.intermediate_size == 28672
    assert config.model.config.parameter_count() == 68976648192


def test_without_use_parallel_no_size_counts(load):
    config = load(LEGACY, {"use_parallel": False, "parallel_config.model_parallel": 4})
    assert config.parallel_config.device_num == 1


STAGES = {"parallel_config.pipeline_stage": 4, "parallel_config.micro_batch_num": 8, "parallel_config.data_parallel": 2}


def test_recomputation_is_what_mindformers_runs(load, account):
    changes = {
        **STAGES,
        "recompute_config.recompute": [9, 3],
        "recompute_config.mp_comm_recompute": False,
        "recompute_config.select_recompute": {
            r"feed_forward\.mul": [8, 8, 8, 20],
            r"feed_forward\.w1\.reshape": True,
            r"attention\.flash attention": True,
        },
    }
    config = load(LEGACY, changes)
    assert config.recompute_config.recompute == (8, 3, 0, 0)
    assert config.recompute_config.select_recompute == {r"feed_forward\.mul": (8, 8, 8, 8)}
    assert config.recompute_config.mp_comm_recompute
    assert not config.recompute_config.recompute_slice_activation
    entries = account(LEGACY, changes)
    assert "as_written" in entries["recompute_config.mp_comm_recompute"].reason
    assert "matches no operator" in entries[r"recompute_config.select_recompute.attention\.flash attention"].reason


def test_ignored_keys_can_be_taken_at_their_word(load):
    changes = {**STAGES, "recompute_config.mp_comm_recompute": False}
    option = "--mindformers.ignored_keys=as_written"
    assert not load(LEGACY, changes, option).recompute_config.mp_comm_recompute
    for wrong in ("--mindformers.ignored_keys=maybe", "--mindformers.ignored=as_run"):
        with pytest.raises(UserError, match=r"as_run|did you mean"):
            load(LEGACY, changes, wrong)


PIPELINE = {
    "parallel_config.pipeline_stage": 2,
    "parallel_config.micro_batch_num": 4,
    "recompute_config.recompute": False,
}


def test_results_that_wait_on_the_host_have_their_names_here(load, account):
    """MindFormers' patterns of attention; one that finds nothing does nothing there."""
    operators = [
        {"op_name": r".*\.flash_attention", "backward_prefetch": 3, "layers": True},
        {"op_name": [r"feed_forward\.mul", r"mlp\.nothing"], "backward_prefetch": 2, "layers": [0, 1]},
    ]
    swap = {"swap_config": {"swap": True, "op_swap": operators}, **PIPELINE}
    assert load(LEGACY, swap).swap_config.of_layer(1) == {
        r"attention\.attention\.flash_attention": 3,
        r"feed_forward\.mul": 2,
    }
    assert "mlp" in account(LEGACY, swap)["swap_config.op_swap"].reason
    plain = load(LEGACY, {"swap_config": {"swap": True, "default_prefetch": 4}, **PIPELINE})
    assert plain.swap_config.of_layer(5) == {r"attention\.attention\.flash_attention": 4}
    whole = load(
        LEGACY, {"swap_config": {"swap": True, "layer_swap": {"backward_prefetch": 1, "layers": [3]}}, **PIPELINE}
    )
    assert (whole.swap_config.of_layer(3), whole.swap_config.of_layer(4)) == ({"": 1}, {})
    off = account(LEGACY, {"swap_config": {"swap": False, "op_swap": operators}})
    assert {one.outcome for key, one in off.items() if key.startswith("swap_config")} == {Outcome.WITHOUT_EFFECT}


def test_lists_of_recomputation_beside_swapping_are_refused(load):
    with pytest.raises(UserError, match="a list has numbers of layers in MindFormers"):
        load(LEGACY, {"swap_config": {"swap": True}, **PIPELINE, "recompute_config.recompute": [1, 0]})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parallel_config.context_parallel", 3, "is not divisible by context_parallel 3"),
        ("parallel_config", {"context_parallel": 2, "context_parallel_algo": "hybrid_cp"}, "write ulysses_cp"),
        (f"{MODEL}.pet_config", {"pet_type": "lora", "pre_seq_len": 8}, "adapters other than LoRA"),
        (f"{MODEL}.res_dtype", "float16", "--model.model_config.res_dtype=bfloat16"),
        ("lr_schedule.type", "MegatronLR", "not here yet"),
        ("train_dataset_task.type", "MultiTurnDataset", "not here yet"),
        ("train_dataset.data_loader.type", "ToolAlpacaDataLoader", "not here yet"),
        ("model.arch.type", "LamaForCausalLM", "did you mean 'LlamaForCausalLM'?"),
        ("swap_config", {"swap": True}, "the micro-batches of a pipeline share"),
        ("only_save_strategy", True, "mindllm dry-run"),
        ("layer_scale", True, "same rate"),
    ],
)
def test_what_would_change_the_result_is_refused(load, key, value, words):
    with pytest.raises(UserError) as caught:
        load(LEGACY, {key: value})
    message = str(caught.value)
    assert words in message
    assert "theirs.yaml:" in message


LATENT = {f"{MODEL}.kv_lora_rank": 512}


@pytest.mark.parametrize(
    ("optimizer", "model", "threshold"),
    [
        ({}, LATENT, 100.0),
        ({"qk_clip_enabled": True}, LATENT, 100.0),
        ({"qk_clip_enabled": True, "qk_clip_threshold": 50}, LATENT, 50),
        ({"qk_clip_threshold": 50}, LATENT, 50),
        ({"qk_clip_enabled": False, "qk_clip_threshold": 50}, LATENT, None),
        (
            {"qk_clip_enabled": True},
            {},
            None,
        ),  # MindFormers' apply_qk_clip_scaling gives back nothing for other attention
    ],
)
def test_qk_clip_is_that_of_latent_attention(optimizer, model, threshold):
    tree = changed(LEGACY, {"optimizer": {"type": "Muon", **optimizer}, **model})
    conversion = convert(Document(tree), ())
    assert conversion.document.data["optimizer"].get("qk_clip_threshold") == threshold
    for key in optimizer:
        (entry,) = [entry for entry in conversion.entries if entry.key == f"optimizer.{key}"]
        assert (entry.outcome is Outcome.WITHOUT_EFFECT) == (threshold is None)


NAMES = sorted(
    {key for key in KEYS if "*" not in key and "[]" not in key and not key.startswith(("model.", "train_d", "eval_d"))}
)
WORDS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(key=st.sampled_from([*NAMES, f"{MODEL}.num_layers", f"{MODEL}.qkv_concat"]), more=WORDS)
def test_a_misspelt_key_is_always_refused(key, more):
    around, _, name = key.rpartition(".")
    wrong = f"{around}.{name}{more}" if around else f"{name}{more}"
    if wrong in KEYS or any(known.startswith(f"{wrong}.") for known in KEYS):
        return
    tree = changed(LEGACY, {wrong: 1})
    problems = convert(Document(tree), ()).document.problems
    if any(f"{'.'.join(wrong.split('.')[:length])}.*" in KEYS for length in range(1, wrong.count(".") + 1)):
        return  # a section that is without effect as a whole
    assert any(
        "unknown key of MindFormers" in str(problem) and problem.path[-1] == wrong.rpartition(".")[2]
        for problem in problems
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("recompute_config.recomput", "did you mean 'recompute'?"),
        ("paralel_config.data_parallel", "did you mean 'parallel_config'?"),
        (f"{MODEL}.num_layer", "did you mean 'num_layers'?"),
        ("runner_config.sink_mod", "did you mean 'sink_mode'?"),
        ("data_parallel", "did you mean 'parallel_config.data_parallel'?"),
        ("train_dataset.data_loader.dataset_dirr", "did you mean 'dataset_dir'?"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_name(load, key, hint):
    with pytest.raises(UserError) as caught:
        load(LEGACY, {key: 1})
    assert hint in str(caught.value)


def test_two_names_of_one_key_must_agree(load):
    assert load(LEGACY, {f"{MODEL}.num_hidden_layers": 32}).model.config.num_layers == 32
    with pytest.raises(UserError, match=r"another name of model\.model_config\.num_layers"):
        load(LEGACY, {f"{MODEL}.num_hidden_layers": 31})


def test_options_may_be_theirs_or_ours(load):
    options = [
        "--model.model_config.checkpoint_name_or_path=x",
        "--runner_config.train_steps",
        "7",
        "--auto_trans_ckpt",
    ]
    config = load(LEGACY, None, *options, "--parallel_config.data_parallel=4", "--generation.max_new_tokens=9")
    assert config.runner_config.train_steps == 7
    assert config.parallel_config.data_parallel == 4
    assert config.generation.max_new_tokens == 9


def test_a_check_that_fails_names_their_line(load, theirs):
    with pytest.raises(UserError) as caught:
        load(LEGACY, {**STAGES, f"{MODEL}.offset": [1, 1, 0, 0]})
    line = next(
        number for number, text in enumerate((theirs(LEGACY, STAGES)).read_text().splitlines(), 1) if "offset:" in text
    )
    assert f"theirs.yaml:{line}: model.model_config.offset: sums to 2" in str(caught.value)


def test_ours_is_not_taken_for_theirs(theirs):
    for path in CONFIGS.rglob("*.yaml"):
        assert not is_mindformers(read_file(path)), path
    resolved = yaml.safe_load(render_config(load_config(CONFIGS / "llama2" / "pretrain_llama2_7b.yaml")))
    assert not is_mindformers(Document(resolved))
    assert is_mindformers(read_file(theirs(LEGACY)))


def test_ours_may_stand_over_theirs(theirs, tmp_path):
    theirs(LEGACY, name="base.yaml")
    path = tmp_path / "ours.yaml"
    path.write_text("base: base.yaml\nseed: 7\n")
    assert load_config(path).seed == 7


BASES = [path for family in ("llama2", "qwen3") for path in sorted((CONFIGS / family).glob("*.yaml"))]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mcore=st.booleans(),
    stages=st.sampled_from([1, 2, 4]),
    recompute=st.booleans() | st.lists(st.integers(0, 9), min_size=1, max_size=4),
    rate=st.floats(1e-8, 1e-1),
    kind=st.sampled_from(["AdamW", "FP32StateAdamWeightDecay", "FusedAdamWeightDecay", "AdamWeightDecayX"]),
)
def test_ours_is_the_same_run_and_converts_to_itself(mcore, stages, recompute, rate, kind):
    if isinstance(recompute, list):
        recompute = recompute[:stages]
    changes = {
        "parallel_config.pipeline_stage": stages,
        "parallel_config.micro_batch_num": 4,
        "recompute_config.recompute": recompute,
        "lr_schedule.learning_rate": rate,
        "lr_schedule.lr_end": 0.0,
        "optimizer.type": kind,
    }
    with tempfile.TemporaryDirectory() as directory:
        path = writer(Path(directory))(MCORE if mcore else LEGACY, changes)
        config = load_config(path)
        ours = Path(directory) / "ours.yaml"
        text = write_short(config, ours, BASES)
        again = load_config(ours)
        assert again == config
        assert short_yaml(again, BASES) == text
        assert len(text.splitlines()) < 90


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.floats(0, 2)
    | st.text(max_size=5)
    | st.lists(st.integers(0, 3), max_size=3)
)
ANY = PLAIN | st.dictionaries(st.sampled_from(["type", "a"]), PLAIN, max_size=2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    key=st.sampled_from([key for key in sorted(KEYS) if "*" not in key and "[]" not in key]),
    value=ANY,
    mcore=st.booleans(),
)
def test_any_value_under_any_key_is_a_run_or_a_user_error(key, value, mcore):
    tree = copy.deepcopy(MCORE if mcore else LEGACY)
    try:
        tree = changed(tree, {key: value})
    except (AttributeError, TypeError):
        return  # below a key that is no section
    with suppress(UserError):
        build_config(convert(Document(tree)), Path("theirs.yaml"))


def test_networks_of_the_new_kind_split_their_table(load, account):
    key = "parallel_config.vocab_emb_dp"
    assert not load(MCORE).parallel_config.vocab_emb_dp
    assert not load(MCORE, {key: True}).parallel_config.vocab_emb_dp
    assert "whatever is written" in account(MCORE, {key: True})[key].reason
    assert load(MCORE, {"parallel_config.model_parallel": 1}).parallel_config.vocab_emb_dp
    assert load(LEGACY, {"use_parallel": True, "parallel_config.model_parallel": 2}).parallel_config.vocab_emb_dp


@pytest.mark.parametrize(
    ("changes", "outcome", "said"),
    [
        ({}, Outcome.USED, ""),
        ({f"{MODEL}.fine_grain_interleave": 4}, Outcome.TRANSLATED, "MindSpore orders 2 parts"),
        ({f"{MODEL}.fine_grain_interleave": 1}, Outcome.WITHOUT_EFFECT, "not split"),
        ({"parallel_config.model_parallel": 1}, Outcome.WITHOUT_EFFECT, "without model_parallel"),
        ({"micro_batch_interleave_num": 2}, Outcome.WITHOUT_EFFECT, "whole copies"),
        (
            {"parallel_config.pipeline_stage": 2, "parallel_config.micro_batch_num": 2},
            Outcome.USED,
            "",
        ),
        ({f"{MODEL}.hidden_dropout": 0.1}, Outcome.WITHOUT_EFFECT, "whole sequences"),
    ],
    ids=str,
)
def test_tokens_are_taken_in_parts_where_layers_can_be_cut(account, load, changes, outcome, said):
    mesh = {"use_parallel": True, "parallel_config.model_parallel": 2, "parallel_config.data_parallel": 4}
    changes = {**mesh, f"{MODEL}.fine_grain_interleave": 2, **changes}
    entry = account(LEGACY, changes)[f"{MODEL}.fine_grain_interleave"]
    assert (entry.outcome, said in entry.reason) == (outcome, True)
    parts = load(LEGACY, changes).model.config.fine_grain_interleave
    assert parts == (1 if outcome is Outcome.WITHOUT_EFFECT else 2)


UNKNOWN = {"parallel_config.enable_fa_var_len": True, "resume_by_last_timestamp_ckpt": False, "future.section.key": 1}


def test_unknown_keys_are_ignored_by_an_option_and_named(load, account, caplog):
    with pytest.raises(UserError, match="resume_by_last_timestamp_ckpt: unknown key of MindFormers"):
        load(MCORE, UNKNOWN)
    assert load(MCORE, UNKNOWN, "--ignore-unknown-keys") == load(MCORE)
    named = [record.message for record in caplog.records if "unknown key of MindFormers, ignored" in record.message]
    assert [message.split(": ")[2] for message in named] == [
        "parallel_config.enable_fa_var_len",
        "resume_by_last_timestamp_ckpt",
        "future",
    ]
    entry = account(MCORE, UNKNOWN, "--ignore-unknown-keys")["future"]
    assert (entry.outcome, "--ignore-unknown-keys" in entry.reason) == (Outcome.WITHOUT_EFFECT, True)


def test_mistakes_of_all_kinds_come_together(load):
    changes = {
        "resume_by_last_timestamp_ckpt": True,
        "context.mode": 1,
        f"{MODEL}.num_heads": 7,
        "run_mode": "predict",
        f"{MODEL}.pad_token_id": 99999999,
    }
    with pytest.raises(UserError) as caught:
        load(LEGACY, changes)
    keys = {problem.key for problem in caught.value.problems}
    assert {"resume_by_last_timestamp_ckpt", f"{MODEL}.num_heads", f"{MODEL}.pad_token_id"} <= keys, keys
    assert not any("required" in problem.message for problem in caught.value.problems)


def test_columns_follow_replicas_that_an_option_changes(load, account, caplog):
    config = load(MCORE, {}, "--parallel_config.data_parallel=4")
    assert config.parallel_config.data_parallel == 4
    assert (
        "dataset_strategy [[2, 1], [2, 1], [2, 1], [2, 1]] is read as [[4, 1], [4, 1], [4, 1], [4, 1]]" in caplog.text
    )
    assert account(MCORE, {}, "--parallel_config.data_parallel=4")["parallel.dataset_strategy"].value == [[4, 1]] * 4


def test_columns_that_do_not_fit_say_what_to_write(load):
    with pytest.raises(UserError) as caught:
        load(MCORE, {"parallel_config.data_parallel": 4})
    written = "write parallel.dataset_strategy: [[4, 1], [4, 1], [4, 1], [4, 1]], or parallel.full_batch: true"
    assert written in str(caught.value)
    assert load(MCORE, {"parallel_config.data_parallel": 4}, "--parallel.dataset_strategy=[[4, 1]]")
    assert load(MCORE, {"parallel_config.data_parallel": 4}, "--parallel.full_batch=true")


@pytest.mark.parametrize("value", [float("inf"), 10**300, float("nan")])
@pytest.mark.parametrize("key", ["expand_ratio", "ffn_dim_multiplier", "hidden_size"])
def test_numbers_beyond_any_model_are_mistakes(load, key, value):
    with pytest.raises(UserError):
        load(LEGACY, {f"{MODEL}.{key}": value, f"{MODEL}.intermediate_size": ...})
