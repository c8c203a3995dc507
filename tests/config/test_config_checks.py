"""Combinations that cannot work are refused by name; those beside them work."""

import re

import pytest

PIPELINE = "--parallel_config={pipeline_stage: 4, micro_batch_num: 4}"
TENSOR = "--parallel_config={model_parallel: 4}"
INTERLEAVED = ("--use_parallel", PIPELINE, "--parallel.pipeline_config.pipeline_interleave")
TWO_CHUNKS = (*INTERLEAVED, "--model.model_config.pp_interleave_num=2")
MODEL = "model.model_config"

# Options over 8 layers, 8 heads, hidden 64, vocabulary 96, sequence 32; the key at fault; words of the message.
REFUSED = [
    (["--run_mode=finetune"], "load_checkpoint", "run_mode finetune starts from a checkpoint"),
    (["--run_mode=eval", "--resume_training"], "resume_training", "run_mode eval does not train (value True)"),
    (["--run_mode=predict"], "processor.tokenizer.vocab_file", "needs the path of a tokenizer"),
    (["--run_mode=chat"], "processor.tokenizer.vocab_file", "run_mode chat needs the path of a tokenizer"),
    (["--generation={num_beams: 2, do_sample: true}"], "generation.do_sample", "beam search does not draw"),
    (["--generation={num_beams: 2, stop_strings: a}"], "generation.stop_strings", "ends at the end of text only"),
    (
        ["--generation={num_beams: 2, num_return_sequences: 3}"],
        "generation.num_return_sequences",
        "2 beams give at most as many continuations (value 3)",
    ),
    (["--generation.num_return_sequences=2"], "generation.num_return_sequences", "write do_sample: true"),
    (
        ["--run_mode=chat", "--processor.tokenizer.vocab_file=a", "--generation.num_beams=2"],
        "generation.num_beams",
        "writes one answer as it grows",
    ),
    (
        ["--train_dataset.data_loader.config.data_path="],
        "train_dataset.data_loader.config.data_path",
        "needs the prefix",
    ),
    (
        ["--train_dataset.data_loader.config.data_path=[]"],
        "train_dataset.data_loader.config.data_path",
        "needs the prefix",
    ),
    (["--train_dataset.data_loader.config.split=0,1"], "train_dataset.data_loader.config.split", "nothing to train on"),
    (
        ["--do_eval", "--train_dataset.data_loader.config.split=9"],
        "train_dataset.data_loader.config.split",
        "valid part",
    ),
    (
        ["--run_mode=eval", "--eval_dataset.split=test", "--train_dataset.data_loader.config.split=9,1"],
        "train_dataset.data_loader.config.split",
        "test part",
    ),
    (["--lr_schedule.lr_end=1"], "lr_schedule.lr_end", "above learning_rate 0.001 (value 1.0)"),
    (["--lr_schedule.warmup_lr_init=1"], "lr_schedule.warmup_lr_init", "above learning_rate 0.001"),
    (["--lr_schedule.total_steps=0"], "lr_schedule.total_steps", "-1 (the length of the run)"),
    (["--lr_schedule={warmup_steps: 1, warmup_ratio: 0.1}"], "lr_schedule", "set one of them to null"),
    (
        [
            "--runner_config.train_steps=5",
            "--lr_schedule={type: WarmUpStableDecayLR, learning_rate: 1, warmup_steps: 6}",
        ],
        "lr_schedule.warmup_steps",
        "leaves none of the 5 steps to the decay (value 6)",
    ),
    (
        ["--lr_schedule={type: WarmUpStableDecayLR, learning_rate: 1, warmup_ratio: 0.5, decay_ratio: 0.6}"],
        "lr_schedule.decay_ratio",
        "together with warmup_ratio 0.5",
    ),
    (
        ["--runner_wrapper.scale_sense={type: DynamicLossScaleUpdateCell, scale_factor: 1}"],
        "runner_wrapper.scale_sense.scale_factor",
        "would never change",
    ),
    (["--profile", "--profile_start_step=20"], "profile_stop_step", "before profile_start_step 20 (value 10)"),
    (["--profile_rank_ids=[1]"], "profile_rank_ids", "no such rank (value 1)"),
    ([f"--{MODEL}.num_heads=7"], f"{MODEL}.num_heads", "does not divide hidden_size 64 (value 7)"),
    ([f"--{MODEL}.head_dim=9"], f"{MODEL}.head_dim", "must be even"),
    ([f"--{MODEL}.n_kv_heads=3"], f"{MODEL}.n_kv_heads", "must divide num_heads 8 (value 3)"),
    (
        [f"--{MODEL}.ffn_dim_multiplier=2", f"--{MODEL}.intermediate_size=200"],
        f"{MODEL}.intermediate_size",
        "gives 512",
    ),
    ([f"--{MODEL}.max_position_embedding=31"], f"{MODEL}.seq_length", "above max_position_embedding 31 (value 32)"),
    ([f"--{MODEL}.loss_chunks=5"], f"{MODEL}.loss_chunks", "must divide seq_length 32 (value 5)"),
    (
        [f"--{MODEL}.rope_scaling={{type: llama3, factor: 8, high_freq_factor: 1}}"],
        f"{MODEL}.rope_scaling.high_freq_factor",
        "above low_freq_factor 1.0",
    ),
    (
        [f"--{MODEL}.eos_token_id=96", "--run_mode=predict", "--processor.tokenizer.vocab_file=t.json"],
        f"{MODEL}.eos_token_id",
        "must be below vocab_size 96 (value 96)",
    ),
    (["--parallel_config.data_parallel=2"], "use_parallel", "asks for 2 devices (2 x 1 x 1)"),
    (["--use_parallel", TENSOR, "--parallel.parallel_mode=0"], "parallel.parallel_mode", "write semi_auto_parallel"),
    (["--parallel.dataset_strategy=[[1, 1]]"], "parallel.dataset_strategy", "full_batch"),
    (
        ["--parallel.parallel_optimizer_config.gradient_accumulation_shard"],
        "parallel.parallel_optimizer_config.gradient_accumulation_shard",
        "enable_parallel_optimizer: true",
    ),
    (
        ["--parallel.parallel_optimizer_config.optimizer_weight_shard_size=2"],
        "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
        "divide data_parallel 1 (value 2)",
    ),
    (["--use_parallel", TENSOR, f"--{MODEL}.n_kv_heads=2"], f"{MODEL}.n_kv_heads", "model_parallel 4 (value 2)"),
    (["--use_parallel", TENSOR, f"--{MODEL}.vocab_size=97"], f"{MODEL}.vocab_size", "shared by one rank only"),
    (["--use_parallel", TENSOR, f"--{MODEL}.intermediate_size=202"], f"{MODEL}.intermediate_size", "shared by 2"),
    (
        ["--use_parallel", TENSOR, f"--{MODEL}.seq_length=30", "--parallel_config.use_seq_parallel"],
        f"{MODEL}.seq_length",
        "model_parallel 4 (value 30)",
    ),
    (["--parallel_config.micro_batch_num=2"], "parallel_config.micro_batch_num", "gradient_accumulation_steps"),
    (
        ["--use_parallel", "--parallel_config.pipeline_stage=4"],
        "parallel_config.micro_batch_num",
        "at least pipeline_stage 4",
    ),
    (
        ["--use_parallel", PIPELINE, "--runner_config.gradient_accumulation_steps=2"],
        "runner_config.gradient_accumulation_steps",
        "parallel_config.micro_batch_num",
    ),
    ([f"--{MODEL}.pp_interleave_num=2"], f"{MODEL}.pp_interleave_num", "need a pipeline (value 2)"),
    (
        ["--use_parallel", PIPELINE, f"--{MODEL}.pp_interleave_num=2"],
        f"{MODEL}.pp_interleave_num",
        "pipeline_interleave: true",
    ),
    ([*INTERLEAVED, f"--{MODEL}.pp_interleave_num=3"], f"{MODEL}.num_layers", "needs at least 12 layers (value 8)"),
    (["--use_parallel", PIPELINE, f"--{MODEL}.num_layers=9"], f"{MODEL}.offset", "for example [0, 0, 0, 1] (value 0)"),
    (["--use_parallel", PIPELINE, f"--{MODEL}.offset=[1, 0, 0]"], f"{MODEL}.offset", "needs 4 numbers"),
    (["--use_parallel", PIPELINE, "--recompute_config.recompute=[1, 1]"], "recompute_config.recompute", "4 counts"),
    (
        ["--use_parallel", PIPELINE, "--recompute_config.recompute=[1, 1, 1, 3]"],
        "recompute_config.recompute",
        "stage 3 has only 2 layers, not 3; write 2 or true for all",
    ),
    (["--recompute_config.select_recompute={a: [9]}"], "recompute_config.select_recompute.a", "only 8 layers"),
    ([*TWO_CHUNKS, "--recompute_config.recompute=[[1, 1, 1, 1]]"], "recompute_config.recompute", "2 lists"),
    (
        [*TWO_CHUNKS, "--recompute_config.recompute=[[1, 1, 1, 1], [2, 1, 1, 1]]"],
        "recompute_config.recompute",
        "stage 0 of chunk 1 has only 1 layers",
    ),
]

ACCEPTED = [
    ["--run_mode=finetune", "--load_checkpoint=a"],
    ["--run_mode=finetune", "--resume_training"],
    ["--run_mode=predict", "--processor.tokenizer.vocab_file=a", "--train_dataset.data_loader.config.data_path="],
    ["--generation={num_beams: 3, num_return_sequences: 3, early_stopping: never, length_penalty: -1.0}"],
    ["--generation={do_sample: true, num_return_sequences: 3, stop_strings: [a, b]}"],
    [f"--{MODEL}.num_heads=7", f"--{MODEL}.head_dim=8"],
    [f"--{MODEL}.ffn_dim_multiplier=2", f"--{MODEL}.intermediate_size=512"],
    ["--use_parallel", TENSOR, "--parallel_config.use_seq_parallel"],
    ["--use_parallel", TENSOR, f"--{MODEL}.vocab_size=97", f"--{MODEL}.tie_word_embeddings"],
    ["--use_parallel", "--parallel_config.data_parallel=2", "--parallel.parallel_mode=DATA_PARALLEL"],
    ["--use_parallel", PIPELINE, f"--{MODEL}.num_layers=9", f"--{MODEL}.offset=[1, 0, 0, 0]"],
    ["--use_parallel", PIPELINE, "--recompute_config.recompute=[2, 1, true, false]"],
    [*TWO_CHUNKS, "--recompute_config.recompute=[2, 2, 1, 0]"],
    [*TWO_CHUNKS, "--recompute_config.recompute=[[1, 1, 1, true], [0, 0, 0, 0]]"],
    [
        *TWO_CHUNKS,
        "--recompute_config.select_recompute={feed_forward\\.mul: [[1, 1, 1, true], [0, 0, 0, 0]], other: true}",
    ],
    ["--recompute_config.select_comm_recompute=['.*\\.norm']"],
    ["--lr_schedule={warmup_steps: 1, warmup_ratio: null}"],
]


@pytest.mark.parametrize(("options", "key", "words"), REFUSED, ids=[" ".join(options) for options, _, _ in REFUSED])
def test_refused(refused, options, key, words):
    message = refused(*options)
    assert f": {key}: " in message
    assert words in message
    assert len(message.splitlines()) == 1, message


@pytest.mark.parametrize("options", ACCEPTED, ids=[" ".join(options) for options in ACCEPTED])
def test_accepted(load, options):
    load(*options)


def test_all_findings_are_reported_at_once(refused):
    message = refused(
        "--parallel_config.data_parallel=2", "--model.model_config.loss_chunks=5", "--lr_schedule.lr_end=1"
    )
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    ("dp", "pp", "goes"),
    [
        (3, 2, False),
        (6, 2, False),
        (12, 2, False),
        (24, 2, True),
        (4, 3, False),
        (8, 3, True),
        (24, 1, True),
        (2, 2, True),
    ],
)
def test_numbers_of_devices_are_those_that_mind_spore_compiles_for(load, refused, dp, pp, goes):
    options = ["--use_parallel=true", "--context.device_target=Ascend", f"--parallel_config.data_parallel={dp}"]
    options += [f"--parallel_config.pipeline_stage={pp}", f"--parallel_config.micro_batch_num={pp}"]
    options += ["--model.model_config.num_layers=12"]
    if goes:
        assert load(*options).parallel_config.device_num == dp * pp
    else:
        said = refused(*options)
        assert f"parallel_config.data_parallel: makes {dp * pp} devices" in said
        number = int(re.search(r"write (\d+)", said).group(1))
        changed = [*options[:2], f"--parallel_config.data_parallel={number}", *options[3:]]
        assert load(*changed).parallel_config.data_parallel == number


def test_replicas_on_cpus_may_be_any_number(load):
    options = ("--use_parallel=true", "--context.device_target=CPU", "--parallel_config.data_parallel=3")
    assert load(*options).parallel_config.device_num == 3


@pytest.mark.parametrize(
    "option",
    [
        "--context.max_device_memory=much",
        "--export_hf.max_shard_size=5",
        "--train_dataset.data_loader.config.split=a,b",
    ],
)
def test_no_regular_expression_reaches_the_user(refused, option):
    said = refused(option)
    assert "must be" in said
    assert not set("^\\$*") & set(said.replace(option, ""))


def test_a_key_of_another_data_loader_is_told_by_the_type_it_belongs_to(refused):
    said = refused("--train_dataset.data_loader.config.packing=true")
    assert "it is a key of CommonDataLoader" in said


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (
            [f"--{MODEL}.eos_token_id=[3, 96]"],
            f"{MODEL}.eos_token_id: must be below vocab_size 96 (value 96); not used",
        ),
        ([f"--{MODEL}.pad_token_id=96"], f"{MODEL}.pad_token_id: must be below vocab_size 96 (value 96); not used"),
        (
            ["--runner_config.train_steps=5", "--lr_schedule.warmup_steps=6"],
            "lr_schedule.warmup_steps: longer than the schedule of 5 steps",
        ),
    ],
)
def test_what_a_run_does_not_use_is_a_warning(load, caplog, options, warning):
    load(*options)
    assert [warning in record.message for record in caplog.records] == [True]


def test_a_token_that_tasks_use_is_a_mistake(refused):
    callbacks = "--callbacks=[{type: EvalTasks, tasks: [mmlu]}]"
    assert "must be below vocab_size 96" in refused(f"--{MODEL}.bos_token_id=96", callbacks)
