"""MindSpore's dry run through the command a user types: data, steps, evaluation, checkpoint and resume of any rank."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import ROOT, run
from safetensors import safe_open

from mindllm.compiled.device.stand_in import COMPILERS
from mindllm.config import load_config
from mindllm.data import CorpusWriter, load_tokenizer

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="stand-ins need a C compiler")
EIGHT = (
    "--context.device_target=Ascend",
    "--use_parallel=true",
    "--batch_size=1",
    "--parallel_config={data_parallel: 2, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 2, use_seq_parallel: true}",
    "--parallel={enable_parallel_optimizer: true, full_batch: false, "
    "parallel_optimizer_config: {parallel_optimizer_threshold: 0}}",
    "--eval_step_interval=2",
)
MEMORY_LINES = (
    "Device MOC memory size: 65536M",
    "MindSpore Used memory size:",
    "MindSpore memory base address:",
    "Used peak memory usage (without fragments):",
    "Actual peak memory usage (with fragments):",
)
PIPELINE = re.compile(r"pipeline_stage: ([2-9]|[1-9][0-9])")
SHIPPED = sorted(
    path
    for path in (ROOT / "configs").glob("*/pretrain_*.yaml")
    if PIPELINE.search(path.read_text()) or re.fullmatch(r"pretrain_llama2_.*p", path.stem)
)


@pytest.fixture
def simulate(monkeypatch):
    """Runs ``run_llm.py`` as rank ``rank`` of ``size`` simulated devices."""

    def simulated(config_file, output, rank, size, *options, expect=0, seconds=300):
        for name, value in {"MS_SIMULATION_LEVEL": "1", "RANK_SIZE": str(size), "RANK_ID": str(rank)}.items():
            monkeypatch.setenv(name, value)
        return run(config_file, output, *options, expect=expect, seconds=seconds)

    return simulated


def assert_ran(printed, output, rank, step):
    for line in MEMORY_LINES:
        assert line in printed
    assert "loss:" not in printed
    assert "nothing is computed" in printed
    own = output / "simulated" / f"rank_{rank}"
    assert (own / "checkpoint" / f"llm-{step}" / "manifest.json").is_file()
    assert not (own / "metrics.jsonl").exists()
    assert not (output / "checkpoint").exists()
    return own


@pytest.mark.parametrize("rank", [5, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 1, 2, 3, 4, 6, 7))])
def test_a_rank_of_eight_runs_stops_and_resumes(rank, config_file, simulate, tmp_path):
    output = tmp_path / "out"
    printed = simulate(config_file, output, rank, 8, *EIGHT, "--runner_config.stop_step=2")
    own = assert_ran(printed, output, rank, 2)
    assert "simulated step 2 of 2" in printed
    assert "step 2: held-out executed" in printed
    printed = simulate(config_file, output, rank, 8, *EIGHT, "--resume_training")
    assert f"resumed from {own / 'checkpoint' / 'llm-2'} at step 2" in printed
    assert_ran(printed, output, rank, 3)


def test_what_it_saved_is_no_start_of_a_real_run(config_file, simulate, monkeypatch, tmp_path):
    options = ("--context.device_target=Ascend", "--do_eval=false")
    printed = simulate(config_file, tmp_path / "out", 0, 1, *options)
    own = assert_ran(printed, tmp_path / "out", 0, 1)
    monkeypatch.delenv("MS_SIMULATION_LEVEL")
    printed = run(config_file, tmp_path / "real", f"--load_checkpoint={own / 'checkpoint' / 'llm-1'}", expect=2)
    assert "written by a simulated run" in printed


def test_a_wrong_world_is_named(config_file, simulate, tmp_path):
    printed = simulate(config_file, tmp_path / "out", 0, 16, *EIGHT, expect=2)
    assert "describes 8 devices, but RANK_SIZE is 16; set RANK_SIZE=8" in printed


@pytest.fixture(scope="module")
def any_corpus(corpus, tmp_path_factory):
    """Enough text for batches of long sequences."""
    prefix = tmp_path_factory.mktemp("long") / "corpus"
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    tokens = np.arange(1 << 20) % 500
    with CorpusWriter(prefix, tokenizer, append_eod=True, source_fingerprint="numbers") as writer:
        for document in np.split(tokens, 64):
            writer.append(document.tolist())
            writer.end_text(document.size)
    return prefix


def reduced(path: Path) -> tuple[int, list[int], list[str]]:
    """Devices of a shipped configuration, the first rank of stages that differ, and options that leave one layer on each.

    Those are the first stage, the last one and one between: the others compile what that one does.
    """
    config = load_config(path)
    sizes = config.parallel_config
    stages = sizes.pipeline_stage
    ahead = config.model.config.num_nextn_predict_layers  # behind the others, on the last stage
    options = [
        f"--model.model_config.num_layers={stages}",
        f"--model.model_config.offset={[0] * (stages - 1) + [ahead] if ahead else 0}",
        "--recompute_config={recompute: false, select_recompute: false, select_comm_recompute: false}",
        "--processor.tokenizer.vocab_file=",
        "--do_eval=false",
        f"--parallel_config.micro_batch_num={stages}" if stages > 1 else "--gradient_accumulation_steps=1",
    ]
    stage_devices = sizes.device_num // stages
    return sizes.device_num, [stage * stage_devices for stage in sorted({0, stages // 2, stages - 1})], options


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_kind_of_stage_of_a_shipped_run(path, any_corpus, simulate, tmp_path):
    devices, ranks, options = reduced(path)
    options.append(f"--train_dataset_dir={any_corpus}")
    for rank in ranks:
        printed = simulate(path, tmp_path / "out", rank, devices, *options, seconds=900)
        for line in MEMORY_LINES:
            assert line in printed
        shutil.rmtree(tmp_path / "out")  # checkpoints of all of them are 70 GB


WIDE = (
    "model.layers.1.feed_forward.w2.weight"  # [32, 88], of which tensor-parallel ranks have columns, and replicas rows
)
TUNED = {
    "galore": (
        "{pet_type: galore, galore_rank: 4, galore_update_proj_gap: 2}",
        {f"adam_m.{WIDE}": (4, 44), f"projection.{WIDE}": (32, 4), "steps_in_interval": ()},
    ),
    "adalora": (
        "{pet_type: adalora, adalora_init_r: 4, adalora_target_r: 2}",
        {
            "importance.model.layers.1.attention.wq.lora_a": (1, 32),
            "kept_ranks.model.layers.1.attention.wq.lora_e": (4,),
        },
    ),
}


@pytest.mark.parametrize("kind", ["galore", pytest.param("adalora", marks=pytest.mark.slow)])
def test_state_that_the_compiler_knows_no_layout_of_is_saved_and_resumed(kind, config_file, simulate, tmp_path):
    output, (section, wanted) = tmp_path / "out", TUNED[kind]
    options = (*EIGHT, f"--model.model_config.pet_config={section}", "--do_eval=false")
    printed = simulate(config_file, output, 5, 8, *options, "--runner_config.stop_step=2")
    own = assert_ran(printed, output, 5, 2)
    shapes = {}
    for file in (own / "checkpoint" / "llm-2").glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            names = tensors.keys()
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    assert {name: shapes.get(name) for name in wanted} == wanted
    printed = simulate(config_file, output, 5, 8, *options, "--resume_training")
    assert_ran(printed, output, 5, 3)
