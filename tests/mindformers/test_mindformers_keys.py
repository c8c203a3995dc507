"""Keys of public YAMLs that MindFormers does not read, and parts that stay trained beside adapters."""

from pathlib import Path

import pytest

from mindllm.config import load_config
from mindllm.config.reading.load import read_file
from mindllm.errors import UserError
from mindllm.mindformers.reader import convert
from tests.mindformers.mindformers_files import LEGACY, LLAMA2_7B, MCORE, writer

MODEL = "model.model_config"
EXAMPLE = Path(__file__).parents[2] / "examples" / "mindformers" / "qwen3_32b_4_layers.yaml"
AS_WRITTEN = "--mindformers.ignored_keys=as_written"
QWEN = {
    **{key: value for key, value in LLAMA2_7B.items() if key not in ("multiple_of", "vocab_size")},
    "type": "QwenConfig",
    "vocab_size": 151936,
    "intermediate_size": 11008,
    "use_flash_attention": False,
}
LORA = {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ".*wq|.*wv"}
SPEECH = {"type": "WhisperConfig", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 80}
PICTURES = {"type": "CogVLM2Config", "freeze_vision": True, "vision_model": {"arch": {"type": "EVAModel"}}}


@pytest.fixture
def theirs(tmp_path):
    """Writes a changed file of MindFormers."""
    return writer(tmp_path)


def reasons(path, *options):
    """What a user is told of every key."""
    return {entry.key: entry.reason for entry in convert(read_file(path), options).entries}


def test_the_width_of_a_head_that_llama_config_does_not_read(theirs):
    path = theirs(LEGACY, {f"{MODEL}.kv_channels": 16, f"{MODEL}.emb_dropout_prob": 0.1})
    model = load_config(path).model.config
    assert (model.head_dim, model.embedding_dropout) == (128, 0.0)
    assert "does not read it" in reasons(path)[f"{MODEL}.kv_channels"]
    model = load_config(path, [AS_WRITTEN]).model.config
    assert (model.head_dim, model.embedding_dropout) == (16, 0.1)


def test_layers_without_recomputation_are_read_by_no_release(theirs):
    glm = {**LEGACY, "model": {"model_config": {"type": "ChatGLM2Config", "no_recompute_layers": [20]}, "arch": {}}}
    path = theirs(glm)
    assert "does not read it" in reasons(path)[f"{MODEL}.no_recompute_layers"]
    assert "recompute_config has" in reasons(path, AS_WRITTEN)[f"{MODEL}.no_recompute_layers"]


def test_parts_that_stay_trained_beside_adapters(theirs):
    model = {"model_config": {**QWEN, "pet_config": LORA}, "arch": {"type": "QwenForCausalLM"}}
    tree = {**LEGACY, "model": model}
    tuning = load_config(
        theirs(tree, {f"{MODEL}.pet_config.freeze_exclude": ["*wte*", "*lm_head*"]})
    ).model.config.pet_config
    assert tuning.modules_to_save == ("tok_embeddings", "lm_head")
    with pytest.raises(UserError, match="modules_to_save"):
        load_config(theirs(tree, {f"{MODEL}.pet_config.freeze_exclude": ["*wpe*"]}))


TELECHAT = {
    "type": "TelechatConfig",
    "seq_length": 1024,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_layers": 30,
    "num_heads": 32,
    "vocab_size": 160256,
    "attention_dropout_prob": 0.1,
    "use_flash_attention": True,
}


@pytest.mark.parametrize(("name", "tied"), [("telechat_7b", True), ("telechat_12b", False), ("", False)])
def test_telechat_has_two_biases_and_its_name_says_whether_the_head_is_the_embedding(theirs, name, tied):
    model = {"model_config": {**TELECHAT, "net_name": name}, "arch": {"type": "TelechatForCausalLM"}}
    model = load_config(theirs({**LEGACY, "model": model})).model.config
    layer = model.architecture.layers[0]
    assert (layer.attention.out_bias, layer.attention.qkv_bias) == (True, False)
    assert (layer.feed_forward.out_bias, layer.feed_forward.bias) == (True, False)
    assert model.tie_word_embeddings is tied
    assert model.initializer_range == 0.0048  # its class has another default than Llama's
    assert model.use_flash_attention == "auto"  # no kernel drops scores


def test_what_a_network_always_has_is_not_written_over_what_a_yaml_says(theirs):
    model = {"model_config": {**TELECHAT, "wo_has_bias": False}, "arch": {"type": "TelechatForCausalLM"}}
    with pytest.raises(UserError, match="no telechat model has attn_proj_has_bias False"):
        load_config(theirs({**LEGACY, "model": model}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.model_config": SPEECH, "model.arch.type": "WhisperForConditionalGeneration"}, "an audio encoder"),
        ({"model.model_config": PICTURES, "model.arch.type": "CogVLM2ForCausalLM"}, "image input"),
        ({"run_mode": "eval", "metric.type": "ADGENMetric"}, "ADGENMetric scores generated text"),
        ({"runner_wrapper": {"type": "TrainOneStepCell", "sens": 1024}}, "only MFTrainOneStepCell"),
        ({"train_dataset": ..., "train_dataset_task": ...}, "no data set is named"),
        ({"model": {}}, "names no network"),
    ],
)
def test_the_first_reason_is_the_true_one(theirs, changes, words):
    with pytest.raises(UserError) as caught:
        load_config(theirs(LEGACY, changes))
    assert words in str(caught.value).splitlines()[0]


@pytest.mark.parametrize("scheduler", ["seqpipe", "seqsmartvpp"])
def test_whole_sequences_in_one_chunk_go_in_the_order_of_1f1b(theirs, scheduler):
    stages = {"parallel_config": {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 4, "micro_batch_num": 8}}
    path = theirs(LEGACY, {**stages, "parallel.pipeline_config": {"pipeline_scheduler": scheduler}})
    assert load_config(path).parallel.pipeline_config.pipeline_scheduler == "1f1b"
    assert "seq_split_num and pp_interleave_num are 1" in reasons(path)["parallel.pipeline_config.pipeline_scheduler"]


@pytest.mark.parametrize("scheduler", ["seqsmartvpp", "zero_bubble_v"])
def test_several_chunks_keep_the_order_that_is_asked_for(theirs, scheduler):
    stages = {"use_parallel": True, "parallel_config.pipeline_stage": 2, "parallel_config.micro_batch_num": 4}
    pipeline = {"pipeline_interleave": True, "pipeline_scheduler": scheduler}
    layers = {"model.model_config.num_layers": 4, "model.model_config.pp_interleave_num": 2}
    config = load_config(theirs(LEGACY, {**stages, **layers, "parallel.pipeline_config": pipeline}))
    assert config.parallel.pipeline_config.pipeline_scheduler == scheduler
    assert config.parallel.pipeline_config.v_shape == (scheduler == "zero_bubble_v")
    assert config.last_stage == (0 if scheduler == "zero_bubble_v" else 1)


def test_pieces_are_read_as_they_are(theirs):
    sizes = {"pipeline_stage": 2, "micro_batch_num": 2, "seq_split_num": 4}
    stages = {"use_parallel": True, "parallel_config": {"data_parallel": 1, "model_parallel": 1, **sizes}}
    pipeline = {"pipeline_interleave": True, "pipeline_scheduler": "seqpipe"}
    config = load_config(theirs(LEGACY, {**stages, "parallel.pipeline_config": pipeline}))
    assert config.parallel_config.seq_split_num == 4
    assert config.parallel.pipeline_config.pipeline_scheduler == "seqpipe"


def test_pieces_fill_no_pipeline_where_there_is_none(theirs):
    path = theirs(LEGACY, {"parallel_config.seq_split_num": 4})
    assert load_config(path).parallel_config.seq_split_num == 1
    assert "pipeline_stage is 1" in reasons(path)["parallel_config.seq_split_num"]


def test_keys_go_round_where_they_do_there(theirs):
    ring = {
        "parallel_config.context_parallel": 2,
        "parallel_config.data_parallel": 4,
        f"{MODEL}.use_ring_attention": True,
    }
    config = load_config(theirs(LEGACY, ring)).parallel_config
    assert (config.context_parallel, config.context_parallel_algo) == (2, "ring_cp")
    both = {**ring, "parallel_config.context_parallel_algo": "colossalai_cp"}
    assert load_config(theirs(LEGACY, both)).parallel_config.context_parallel_algo == "ring_cp"
    with pytest.raises(UserError, match="ring attention over heads is not supported"):
        load_config(theirs(LEGACY, {**ring, "parallel_config.context_parallel_algo": "ulysses_cp"}))


@pytest.mark.parametrize(("share", "taken"), [(256, -1), (4, 4), (-1, -1)])
def test_a_share_that_does_not_divide_the_replicas_is_dropped(theirs, share, taken):
    path = theirs(LEGACY, {"parallel.parallel_optimizer_config.optimizer_weight_shard_size": share})
    assert load_config(path).parallel.parallel_optimizer_config.optimizer_weight_shard_size == taken


def test_the_level_of_compilation_has_two_places(theirs):
    path = theirs(LEGACY, {"context.jit_level": "O0", "context.jit_config": ...})
    assert load_config(path).context.jit_config.jit_level == "O0"


def test_a_section_of_generation_counts_before_keys_of_the_model(theirs):
    section = {"do_sample": True, "top_k": 7, "max_new_tokens": 9, "eos_token_id": [2]}
    path = theirs(LEGACY, {"generation_config": section, f"{MODEL}.top_k": 3, f"{MODEL}.top_p": 0.5})
    generation = load_config(path).generation
    assert (generation.do_sample, generation.top_k, generation.top_p) == (True, 7, 0.5)
    assert generation.max_new_tokens == 9  # the model's max_decode_length is 512
    assert reasons(path)[f"{MODEL}.top_k"] == "generation_config.top_k is given"


COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]
KEY, TYPE, NAMED = f"{MODEL}.input_sliced_sig", "train_dataset.data_loader.type", "train_dataset.input_columns"
FILE = {"train_dataset.data_loader": {"type": "MindDataset", "dataset_dir": "a.mindrecord"}}


@pytest.mark.parametrize(
    ("tree", "sliced", "columns", "shifted", "told"),
    [
        (LEGACY, ..., ["input_ids", "labels"], False, None),
        (LEGACY, False, ["input_ids", "labels"], False, "samples are shifted"),
        (LEGACY, True, ["input_ids", "labels"], True, ""),
        (LEGACY, True, ["input_ids"], False, "without a column labels MindFormers shifts in any case"),
        (MCORE, True, COLUMNS, True, ""),
        (MCORE, False, COLUMNS, True, "never shift labels, whatever is written"),
        (MCORE, ..., COLUMNS, True, "never shift labels"),
    ],
)
def test_whether_rows_are_shifted_is_what_the_network_of_mindformers_does(tree, sliced, columns, shifted, told, theirs):
    path = theirs(tree, {**FILE, KEY: sliced, NAMED: columns})
    assert load_config(path).train_dataset.data_loader.config.shifted_labels == shifted
    said = reasons(path).get(KEY)
    assert said == told or (told and told in said)


def test_a_newer_network_without_labels_learns_nothing(theirs):
    with pytest.raises(UserError, match="learn from a column labels; name it in input_columns"):
        load_config(theirs(MCORE, {**FILE, NAMED: ["input_ids"]}))


def test_the_example_is_read_as_it_is():
    config = load_config(EXAMPLE)
    assert config.train_dataset.data_loader.config.shifted_labels
    assert config.global_batch_size == 8


def test_callbacks_that_only_watch_may_have_keys_of_any_release(theirs):
    stress = {"type": "StressDetectCallBack", "detection_interval": 10, "num_detections": 3}
    told = reasons(theirs(LEGACY, {"callbacks": [{"type": "MFLossMonitor"}, stress]}))
    assert told["callbacks.1.detection_interval"] == told["callbacks.1.type"] == "it only watches"
    with pytest.raises(UserError, match=r"callbacks\.0\.detection_interval: unknown key of MindFormers"):
        load_config(theirs(LEGACY, {"callbacks": [{"type": "MFLossMonitor", "detection_interval": 10}]}))


def test_the_layout_of_weights_by_its_name_of_1_6(theirs):
    assert (
        "joins weight matrices"
        in reasons(theirs(MCORE, {f"{MODEL}.use_contiguous_weight_layout": False}))[
            f"{MODEL}.use_contiguous_weight_layout"
        ]
    )
