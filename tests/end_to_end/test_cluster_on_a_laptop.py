"""Several devices with ``device_target: CPU`` and no launcher: all ranks train in one process, as one device does."""

import pytest
from command_line import STEPS, read_lines, run, trajectory

GENTLE = ("--lr_schedule.learning_rate=1e-3", "--optimizer.eps=1e-4")  # a rate at which rounding does not grow
HALF = STEPS // 2
LAYOUTS = {
    "one": ("--batch_size=4",),
    "tp2_pp2": (
        "--use_parallel=true",
        "--batch_size=2",
        "--parallel_config={model_parallel: 2, pipeline_stage: 2, micro_batch_num: 2, use_seq_parallel: true}",
    ),
    "dp2": (
        "--use_parallel=true",
        "--batch_size=2",
        "--parallel_config.data_parallel=2",
        "--parallel.enable_parallel_optimizer=true",
        "--parallel.parallel_optimizer_config.parallel_optimizer_threshold=0",
    ),
    "dp2_tp2_pp2": (
        "--use_parallel=true",
        "--batch_size=1",
        "--parallel_config={data_parallel: 2, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 2, "
        "use_seq_parallel: true}",
        "--parallel.enable_parallel_optimizer=true",
        "--parallel.parallel_optimizer_config.parallel_optimizer_threshold=0",
    ),
    "dp4_pp2": (
        "--use_parallel=true",
        "--batch_size=1",
        "--parallel_config={data_parallel: 2, pipeline_stage: 2, micro_batch_num: 2}",
    ),
    "cp2_pp2": (
        "--use_parallel=true",
        "--batch_size=2",
        "--parallel_config={context_parallel: 2, pipeline_stage: 2, micro_batch_num: 2}",
    ),
    "tp2": ("--use_parallel=true", "--batch_size=4", "--parallel_config.model_parallel=2"),
}


def assert_same_losses(found, wanted):
    assert [record["step"] for record in found] == [record["step"] for record in wanted]
    for one, other in zip(wanted, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["global_norm"] == pytest.approx(one["global_norm"], rel=1e-4)
        assert other["tokens"] == one["tokens"]


@pytest.fixture(scope="module")
def single(config_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("single") / "out"
    run(config_file, output, *GENTLE, *LAYOUTS["one"])
    return output


@pytest.fixture(scope="module")
def half(config_file, tmp_path_factory):
    """Four ranks that were stopped at half of the run: (output directory, what they printed)."""
    output = tmp_path_factory.mktemp("half") / "out"
    return output, run(config_file, output, *GENTLE, *LAYOUTS["tp2_pp2"], f"--runner_config.stop_step={HALF}")


def test_all_ranks_together_train_as_one_device(single, half):
    output, printed = half
    assert "dp 1 x tp 2 x pp 2: all 4 ranks run in lockstep in this process" in printed
    assert_same_losses(trajectory(output), trajectory(single)[:HALF])
    (evaluated,) = read_lines(output / "evaluation.jsonl")
    wanted = read_lines(single / "evaluation.jsonl")[0]
    assert evaluated["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert evaluated["tokens"] == wanted["tokens"]


def test_their_checkpoint_is_in_parts(half):
    output, _ = half
    files = sorted(path.name for path in (output / "checkpoint" / f"llm-{HALF}").glob("model-*.safetensors"))
    assert files == [f"model-{rank:05d}-of-00004.safetensors" for rank in range(4)]


@pytest.mark.parametrize(
    "layout",
    ["one", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("dp2", "tp2", "dp4_pp2", "cp2_pp2"))],
)
def test_it_goes_on_under_another_layout_and_is_exported(layout, config_file, single, half, tmp_path):
    checkpoint = half[0] / "checkpoint" / f"llm-{HALF}"
    output, exported = tmp_path / "out", tmp_path / "exported"
    options = (*GENTLE, *LAYOUTS[layout], f"--resume_training={checkpoint}", f"--export_hf.directory={exported}")
    run(config_file, output, *options)
    assert_same_losses(trajectory(output), trajectory(single)[HALF:])
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert model.config.num_hidden_layers == 2


def test_they_evaluate(config_file, single, half, tmp_path):
    weights = f"--load_checkpoint={half[0] / 'checkpoint' / f'llm-{HALF}'}"
    printed = [
        run(config_file, tmp_path / layout, "--run_mode=eval", *LAYOUTS[layout], weights, "--eval_dataset.batch_size=4")
        for layout in ("one",)
    ]
    together = run(config_file, tmp_path / "both", "--run_mode=eval", *LAYOUTS["tp2"], weights)
    losses = [text.split("the valid split: ")[1].split(",")[0] for text in (*printed, together)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_eight_ranks_with_everything(config_file, single, tmp_path):
    output = tmp_path / "out"
    run(config_file, output, *GENTLE, *LAYOUTS["dp2_tp2_pp2"])
    assert_same_losses(trajectory(output), trajectory(single))


def test_a_profile_is_refused(config_file, tmp_path):
    assert "profile: not supported when all ranks run in one process" in run(
        config_file, tmp_path / "out", *LAYOUTS["tp2"], "--profile", expect=2
    )


def test_a_model_that_is_too_large_is_refused_before_anything_is_compiled(config_file, tmp_path):
    sizes = ("--model.model_config.hidden_size=8192", "--model.model_config.num_layers=80")
    printed = run(config_file, tmp_path / "out", *LAYOUTS["tp2"], *sizes, expect=2)
    assert "executed together" in printed or "executes together" in printed or "ranks together" in printed
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
