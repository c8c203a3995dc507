"""A run through the command line leaves what the README promises, and learns."""

import json
import re

from command_line import STEPS, read_lines, run
from safetensors.numpy import load_file

LOSS_LINE = re.compile(
    r"\[mindllm/\S+:\d+\] - INFO - \{ Epoch:\[ *\d+/ *\d+\], step:\[ *\d+/ *\d+\], loss: \d+\.\d+, per_step_time: \d+ms, "
    r"lr: \S+, overflow cond: False, loss_scale: 1\.0, global_norm: \[\S+\], train_throughput_per_npu: \S+T"
)


def test_every_step_is_logged_in_the_known_format(finished):
    _, printed = finished
    assert len(LOSS_LINE.findall(printed)) == STEPS
    assert len(re.findall(r"\d+\.\d+ samples/s/p +\d+ tokens/s/p", printed)) == STEPS


def test_metrics_hold_each_step_once_and_the_loss_falls(finished):
    output, _ = finished
    records = read_lines(output / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    wanted = {"step", "loss", "learning_rate", "global_norm", "step_time_s", "tokens_per_s"}
    assert all(wanted <= record.keys() for record in records)
    assert records[-1]["loss"] < records[0]["loss"] - 0.2
    assert records[0]["tokens"] == 4 * 32


def test_held_out_loss_is_reported_with_its_baseline(finished):
    output, printed = finished
    evaluations = read_lines(output / "evaluation.jsonl")
    assert [record["step"] for record in evaluations] == [6, 12]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert 0 < evaluations[-1]["bits_per_byte"] < 8
    assert f"unigram baseline: {evaluations[-1]['unigram_loss']:.4f}" in printed


def test_summary_files_and_resolved_configuration_are_written(finished, config_file):
    output, _ = finished
    assert list((output / "summary").glob("events.out.events.summary.*"))
    assert run(output / "config.yaml", output, "--print_config") == (output / "config.yaml").read_text()


def test_the_profile_is_a_trace_of_the_steps_asked_for(finished):
    output, _ = finished
    events = json.loads((output / "profile" / "rank_0" / "trace.json").read_text())["traceEvents"]
    operators = [event for event in events if event["ph"] == "X"]
    assert len(operators) > 100
    assert all(isinstance(event["ts"], float) and event["dur"] >= 0 for event in operators)
    assert any("MatMul" in event["name"] for event in operators)


def test_checkpoints_hold_weights_and_optimizer_and_only_the_newest_are_kept(finished):
    output, _ = finished
    names = sorted(path.name for path in (output / "checkpoint").iterdir())
    assert names == ["llm-10", "llm-12", "llm-8"]
    weights = load_file(output / "checkpoint" / "llm-12" / "model.safetensors")
    optimizer = load_file(output / "checkpoint" / "llm-12" / "optimizer.safetensors")
    assert {f"adam_m.{name}" for name in weights} <= optimizer.keys()
    assert not any("rotary" in name or "mask" in name for name in weights)


def test_evaluation_of_a_checkpoint_repeats_what_training_reported(finished, config_file):
    output, _ = finished
    printed = run(
        config_file, output.with_name("eval"), "--run_mode=eval", f"--load_checkpoint={output}/checkpoint/llm-12"
    )
    assert f"loss: {read_lines(output / 'evaluation.jsonl')[-1]['loss']:.4f} nats/token" in printed


def test_fine_tuning_starts_from_the_weights_with_a_fresh_optimizer(finished, config_file, tmp_path):
    output, _ = finished
    options = ("--run_mode=finetune", f"--load_checkpoint={output}/checkpoint/llm-12", "--runner_config.stop_step=1")
    run(config_file, tmp_path / "out", *options)
    first = read_lines(tmp_path / "out" / "metrics.jsonl")[0]
    assert first["step"] == 1
    assert first["loss"] < read_lines(output / "metrics.jsonl")[0]["loss"] - 0.2
