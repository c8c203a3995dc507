"""The PyNative form of MindFormers 2.x: the run it describes is that of the form of static graphs, key by key."""

import json
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindllm.cli.convert import main
from mindllm.config import load_config
from mindllm.config.reading.document import leaves, path_of
from mindllm.config.reading.load import read_file
from mindllm.errors import UserError
from mindllm.mindformers.pynative import PYNATIVE
from mindllm.mindformers.reader import convert
from mindllm.mindformers.reading import Outcome
from mindllm.parallel.layer_plan import make_plan
from tests.mindformers.mindformers_files import writer

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL = {
    "model_type": "qwen3",
    "architectures": "Qwen3ForCausalLM",
    "vocab_size": 4096,
    "seq_length": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1.0e-6,
    "rope_theta": 1.0e6,
    "max_position_embeddings": 4096,
    "use_flash_attention": True,
    "params_dtype": "float32",
    "compute_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
DATA = {
    "type": "BlendedMegatronDatasetDataLoader",
    "datasets_type": "GPTDataset",
    "sizes": [8000, 0, 0],
    "config": {"seq_length": 512, "split": "1, 0, 0", "eod": 1, "pad": -1, "data_path": ["1", "/path/corpus"]},
}
PYNATIVE_RUN = {
    "checkpoint": {"save_interleaved_steps": 200, "save_max": 3, "async_save": False, "load_path": ""},
    "training": {"steps": 100, "local_batch_size": 2, "global_batch_size": 32, "max_norm": 0.5, "seed": 7},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1.0e-8, "weight_decay": 0.1},
    "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1.0e-4, "warmup_steps": 10},
    "parallelism": {"data_parallel_shard": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
    "recompute": {"mode": "full", "full_recompute_layer": ["0-7"]},
    "train_dataset": {"dataloader": DATA, "drop_remainder": True, "num_parallel_workers": 8, "numa_enable": False},
    "model": MODEL,
}
STATIC_RUN = {
    "run_mode": "train",
    "use_legacy": False,
    "seed": 7,
    "use_parallel": True,
    "runner_config": {"batch_size": 2, "train_steps": 100, "epochs": 1},
    "runner_wrapper": {"type": "MFTrainOneStepCell", "use_clip_grad": True, "max_grad_norm": 0.5},
    "optimizer": PYNATIVE_RUN["optimizer"],
    "lr_schedule": PYNATIVE_RUN["lr_scheduler"],
    "parallel": {"parallel_mode": 1, "enable_parallel_optimizer": True},
    "parallel_config": {
        "data_parallel": 4,
        "model_parallel": 2,
        "pipeline_stage": 2,
        "micro_batch_num": 4,
        "use_seq_parallel": True,
    },
    "recompute_config": {"recompute": True},
    "callbacks": [
        {"type": "MFLossMonitor"},
        {"type": "CheckpointMonitor", "save_checkpoint_steps": 200, "keep_checkpoint_max": 3},
    ],
    "train_dataset": {"data_loader": DATA, "drop_remainder": True, "num_parallel_workers": 8, "numa_enable": False},
    "model": {"model_config": MODEL},
}


@pytest.fixture
def theirs(tmp_path):
    return writer(tmp_path)


@pytest.fixture
def load(theirs):
    return lambda changes=None, *options: load_config(theirs(PYNATIVE_RUN, changes), options)


def test_it_is_the_run_of_the_other_form(theirs):
    assert load_config(theirs(PYNATIVE_RUN)) == load_config(theirs(STATIC_RUN))


def test_every_key_that_is_written_has_an_outcome_under_its_own_name(theirs):
    conversion = convert(read_file(theirs(PYNATIVE_RUN)))
    entries = {entry.path: entry for entry in conversion.entries}
    for path, value in leaves(PYNATIVE_RUN):
        assert path in entries, path
        assert entries[path].value == value
        assert entries[path].origin.line
        assert entries[path].outcome is not Outcome.REFUSED, entries[path]
    assert {path for path, entry in entries.items() if entry.origin} == {path for path, _ in leaves(PYNATIVE_RUN)}


@pytest.mark.parametrize("key", sorted(key for key in PYNATIVE if not key.endswith("*")))
def test_every_key_of_its_classes_is_known(theirs, key):
    conversion = convert(read_file(theirs(PYNATIVE_RUN, {key: None})))
    assert not [problem for problem in conversion.document.problems if "unknown" in problem.message], key
    assert path_of(key) in {entry.path for entry in conversion.entries}


@pytest.mark.parametrize(
    ("changes", "replicas", "parts"),
    [
        ({"parallelism.data_parallel_shard": 8}, 8, 2),
        ({"training.global_batch_size": 67}, 4, 8),  # rounded down, as its trainer does
        ({"parallelism.data_parallel_shard": 1}, 1, 16),
    ],
)
def test_the_batch_says_how_often_gradients_are_accumulated(load, changes, replicas, parts):
    staged = load(changes)
    assert (staged.parallel_config.data_parallel, staged.parallel_config.micro_batch_num) == (replicas, parts)
    flat = load({**changes, "parallelism.pipeline_parallel": 1})
    assert flat.runner_config.gradient_accumulation_steps == parts
    assert flat.global_batch_size == staged.global_batch_size == replicas * parts * 2


def test_layers_of_stages_may_be_uneven_and_interleaved(load):
    uneven = load({"parallelism.pipeline_parallel_layers_per_stage": ["0-2", "3-7"]})
    assert [layer.stage for layer in make_plan(uneven).layers] == [0, 0, 0, 1, 1, 1, 1, 1]
    several = {
        "parallelism.pipeline_parallel_interleave_num": 2,
        "parallelism.pipeline_parallel_layers_per_stage": ["0-2,4", "3,5-7"],
    }
    plan = make_plan(load(several)).layers
    assert [(layer.chunk, layer.stage) for layer in plan] == [(0, 0)] * 3 + [(0, 1)] + [(1, 0)] + [(1, 1)] * 3


@pytest.mark.parametrize(
    "said", [["0-3"], ["0-3", "5-7"], ["0-3", "4-8"], ["4-7", "0-3"], ["a", "b"], 3, ["0-3,4", "5-7"]]
)
def test_layers_that_do_not_come_out_are_refused(load, said):
    with pytest.raises(
        UserError, match=r"pipeline_parallel_layers_per_stage: must be 1 intervals in order for each of 2"
    ):
        load({"parallelism.pipeline_parallel_layers_per_stage": said})


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["0-7"], [True] * 8),
        (["0-1", "4"], [True, True, False, False, True, False, False, False]),
        (["4-7"], [False] * 4 + [True] * 4),
    ],
)
def test_recomputed_layers(load, layers, expected):
    plan = make_plan(load({"recompute.full_recompute_layer": layers})).layers
    assert [bool(layer.recompute) for layer in plan] == expected


def test_recomputed_layers_that_are_not_the_first_of_a_stage_are_refused(load):
    with pytest.raises(
        UserError, match=r"recompute.full_recompute_layer: of every stage the first layers are recomputed"
    ):
        load({"recompute.full_recompute_layer": ["1-2"]})


def test_nothing_is_recomputed_unless_a_mode_says_so(load):
    assert load({"recompute.mode": "None"}).recompute_config.recompute is False


def test_checkpoints(load):
    kinds = [callback.type for callback in load({"checkpoint.enable_save": False}).callbacks]
    assert kinds == ["MFLossMonitor"]
    resumed = load({"checkpoint.load_path": "out/checkpoint"})
    assert (resumed.load_checkpoint, resumed.resume_training) == ("out/checkpoint", True)
    begun = load({"checkpoint.load_path": "weights", "checkpoint.no_load_optim": True})
    assert (begun.load_checkpoint, begun.resume_training) == ("weights", False)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parallelism.tensor_paralel", 2, "unknown key of MindFormers"),
        ("parallelism.cpu_offload", True, "weights stay on the device"),
        ("parallelism.pipeline_parallel_enable_dxdw_split", True, "no backward pass in two parts"),
        ("parallelism.context_parallel_mask_type", "full", "masks are causal here"),
        ("recompute.mode", "select", "modules have other names here"),
        ("recompute_comm.enable", True, "modules have other names here"),
        ("swap.enable", True, "modules have other names here"),
        ("optimizer.weight_decay_exclude", ["norm"], "matrices are decayed"),
        ("model.num_hidden_layer", 4, "unknown key of MindFormers"),
    ],
)
def test_what_would_change_the_result_is_refused_under_its_own_name(load, key, value, words):
    with pytest.raises(UserError) as refused:
        load({key: value})
    (line,) = [line for line in str(refused.value).splitlines() if words in line]
    assert f": {key}: " in line


def test_all_devices_of_a_launch_are_those_that_the_batch_is_for(load):
    flat = {"parallelism.data_parallel_shard": -1, "parallelism.pipeline_parallel": 1}
    assert load(flat).parallel_config.data_parallel == 16
    with pytest.raises(
        UserError, match=r"theirs.yaml:9: parallel_config.micro_batch_num: must be at least pipeline_stage 2"
    ):
        load({"parallelism.data_parallel_shard": -1})


def test_a_size_of_nothing_names_its_line(load):
    with pytest.raises(UserError, match=r"theirs.yaml:8: runner_config.batch_size"):
        load({"training.local_batch_size": 0})


def test_options_may_be_of_any_form(load):
    assert load(None, "--training.local_batch_size=4").runner_config.batch_size == 4
    assert load(None, "--parallelism.data_parallel_shard=8").parallel_config.data_parallel == 8
    assert load(None, "--parallel_config.data_parallel=8").parallel_config.data_parallel == 8
    assert load(None, "--model.num_hidden_layers=10", "--recompute.mode=None").model.config.num_layers == 10


QWEN, DEEPSEEK = CONFIGS / "qwen3/pretrain_qwen3_8b.yaml", CONFIGS / "deepseek/pretrain_deepseek_v3_671b.yaml"
STEPS = "--runner_config.train_steps=100"
SORTED = (
    *("--model.model_config.moe_grouped_gemm=true", "--model.model_config.capacity_factor=null"),
    "--model.model_config.moe_token_dispatcher_type=alltoall",
)


@pytest.fixture
def there_and_back(tmp_path, capsys):
    """Writes a run in the PyNative form by the command line and loads what was written; with the run itself."""

    def moved(config, *options, flags=()):
        options, output = (STEPS, *options), tmp_path / "theirs.yaml"
        assert main([str(config), "--to", "mindformers-2", "-o", str(output), *flags, *options]) == 0
        return load_config(config, options), load_config(output), capsys.readouterr().out

    return moved


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (QWEN, ()),
        (CONFIGS / "qwen3/pretrain_qwen3_32b.yaml", ("--lr_schedule.warmup_ratio=0.1", "--optimizer.eps=1e-6")),
        (
            CONFIGS / "qwen3/pretrain_qwen3_0_6b.yaml",
            ("--optimizer.type=Muon", "--seed=5", "--runner_config.batch_size=2"),
        ),
        (DEEPSEEK, SORTED),
        (DEEPSEEK, (*SORTED, "--optimizer.type=Muon", "--optimizer.qk_clip_threshold=50")),
    ],
)
def test_a_run_of_ours_is_the_same_run_there(there_and_back, config, options):
    ours, theirs, _ = there_and_back(config, *options)
    for key in ("seed", "runner_config.train_steps", "optimizer", "lr_schedule.type", "lr_schedule.learning_rate"):
        assert attrgetter(key)(ours) == attrgetter(key)(theirs), key
    assert theirs.model.config.architecture == ours.model.config.architecture
    assert theirs.global_batch_size == ours.global_batch_size
    sizes = ("data_parallel", "model_parallel", "pipeline_stage", "micro_batch_num", "expert_parallel")
    assert [getattr(theirs.parallel_config, key) for key in sizes] == [
        getattr(ours.parallel_config, key) for key in sizes
    ]
    assert [(layer.stage, layer.chunk) for layer in make_plan(theirs).layers] == [
        (layer.stage, layer.chunk) for layer in make_plan(ours).layers
    ]


def test_uneven_and_interleaved_layers_move(there_and_back):
    options = (
        "--parallel_config={pipeline_stage: 4, micro_batch_num: 16, data_parallel: 2, model_parallel: 1}",
        "--model.model_config.pp_interleave_num=2",
        "--parallel.pipeline_config.pipeline_interleave=true",
        "--model.model_config.offset=[[1, 0, 0, 0], [1, 1, 1, 0]]",
        "--recompute_config.recompute=[[2, 0, 0, 0], [0, 0, 0, 3]]",
    )
    ours, theirs, told = there_and_back(QWEN, *options)
    assert make_plan(theirs).layers == make_plan(ours).layers
    assert "not carried over" not in told


def test_what_costs_memory_alone_is_told(there_and_back):
    chunks = ("--model.model_config.loss_chunks=4", "--recompute_config={recompute: false, select_recompute: true}")
    *_, printed = there_and_back(QWEN, *chunks, flags=("--json",))
    told = json.loads(printed)["not carried over"]
    assert told["model.model_config.loss_chunks"] == "the logits of a sequence are whole there; they take more memory"
    assert "names of modules differ" in told["recompute_config.select_recompute"]


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (DEEPSEEK, (STEPS,), "model.model_config.capacity_factor: has no PyNative form (value 1.5)"),
        (QWEN, (), "runner_config.train_steps: how many steps?"),
        (CONFIGS / "llama2/pretrain_llama2_7b.yaml", (STEPS,), "is known to have deepseek_v3, qwen3"),
        (QWEN, (STEPS, "--runner_wrapper.use_clip_grad=false"), "gradients are always clipped there"),
        (QWEN, (STEPS, "--runner_wrapper.skip_spikes={}"), "runner_wrapper.skip_spikes"),
        (
            QWEN,
            (STEPS, "--train_dataset.data_loader={type: MindDataset, config: {data_path: a.mindrecord}}"),
            "moves with a corpus of",
        ),
        (
            QWEN,
            (STEPS, "--parallel.enable_parallel_optimizer=false", "--parallel_config.data_parallel=8"),
            "replicas of 1",
        ),
    ],
)
def test_a_run_that_would_be_another_one_there_is_refused(tmp_path, config, options, told):
    output = tmp_path / "theirs.yaml"
    with pytest.raises(UserError) as refused:
        main([str(config), "--to", "mindformers-2", "-o", str(output), *options])
    assert told in str(refused.value)
    assert not output.exists()


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.floats(allow_nan=False), st.text(max_size=6), st.just([]), st.just({}),
    st.lists(st.sampled_from(["0-3", "4-7", "5", 3]), max_size=4),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(key for key in PYNATIVE if not key.endswith("*"))), value=VALUES)
def test_any_value_under_any_key_is_a_run_or_a_user_error(theirs, key, value):
    with suppress(UserError):
        load_config(theirs(PYNATIVE_RUN, {key: value}))


def test_unknown_keys_are_ignored_by_an_option(theirs, load):
    key = "parallelism.future_key"
    with pytest.raises(UserError, match="future_key: unknown key of MindFormers"):
        load({key: 2})
    assert load_config(theirs(PYNATIVE_RUN, {key: 2}), ["--ignore-unknown-keys"]) == load({})


def test_half_precision_has_the_float32_copies_that_this_trainer_always_keeps(theirs):
    changed = theirs(PYNATIVE_RUN, {"model.params_dtype": "bfloat16"})
    config = load_config(changed)
    assert config.model.config.param_init_type == "bfloat16"
    assert config.optimizer.master_weights
    (entry,) = (entry for entry in convert(read_file(changed)).entries if entry.path == ("model", "params_dtype"))
    assert "keep a float32 copy of every parameter" in entry.reason
    assert not load_config(theirs(STATIC_RUN, {"model.model_config.params_dtype": "bfloat16"})).optimizer.master_weights
    assert not load_config(theirs(PYNATIVE_RUN)).optimizer.master_weights


def test_muon_in_half_precision_says_that_nothing_is_copied(theirs):
    changed = theirs(PYNATIVE_RUN, {"model.params_dtype": "bfloat16", "optimizer": {"type": "Muon"}})
    assert not load_config(changed).optimizer.master_weights
    (entry,) = (entry for entry in convert(read_file(changed)).entries if entry.path == ("model", "params_dtype"))
    assert "Muon here keeps none" in entry.reason
