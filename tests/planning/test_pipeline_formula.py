"""Plans of a run YAML whose costs come from formulas: mixtures, a layer that predicts ahead, several chunks."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindllm.cli.plan import main
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.dry_run import simulations
from mindllm.dry_run.simulations import Simulations
from mindllm.errors import CheckFailed
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.stages import Stage
from mindllm.planning import validate as validation
from mindllm.planning.costs import formula
from mindllm.prove.pieces import Options
from mindllm.prove.prove import prove_run
from mindllm.schedules.steady import NotSteady
from mindllm.strategies.search import evaluate_current
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.prediction import predict
from mindllm.timing.step import step_time
from mindllm.timing.verdict import memory_limit, usable_memory

CONFIGS = Path(__file__).parents[2] / "configs"
GB, MIB = 1 << 30, 1 << 20
DEVICE = read_device(DEFAULT)
OFFSET = "--model.model_config.offset=[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"
ALONE = ["--parallel_config={pipeline_stage: 1, micro_batch_num: 1}", "--model.model_config.offset=0"]


def planned(capsys, *arguments):
    main([*map(str, arguments), "--no-validate", "--seconds", "20", "--json"])
    return json.loads(capsys.readouterr().out)


def test_deepseek_v3_is_planned_with_the_layer_that_predicts_ahead_on_the_last_stage(tmp_path, capsys):
    output = tmp_path / "planned.yaml"
    source = CONFIGS / "deepseek/pretrain_deepseek_v3_671b.yaml"
    layout = tmp_path / "megatron.txt"
    files = ("--no-validate", "--apply", "--output", str(output), "--megatron", str(layout))
    main(["--config", str(source), "--seconds", "20", *files])
    assert layout.read_text().endswith(',m,L"\n')
    assert "lower bound of all plans" in capsys.readouterr().out
    config = load_config(output)
    plan = make_plan(config)
    assert len(plan.layers) == 62  # 3 dense, 58 with experts, 1 that predicts ahead
    assert plan.layers[-1].stage == 15
    assert max(stage_bytes(workload_of(config))) <= float(config.context.max_device_memory.removesuffix("GB")) * GB


def test_the_fastest_number_of_chunks_is_taken(capsys):
    source = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml"
    one = planned(capsys, "--config", source)
    best = planned(capsys, "--config", source, "--interleave", "1", "2")
    assert best["step_time"] < one["step_time"]
    assert len(best["offset"]) == 2


def test_a_run_in_gpipe_is_planned_in_that_order(capsys):
    """It takes as much longer than 1F1B as the model of time says."""
    source, told, timed = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml", {}, {}
    for schedule in ("1f1b", "gpipe"):
        key = f"--parallel.pipeline_config.pipeline_scheduler={schedule}"
        told[schedule] = planned(capsys, "--config", source, key)["yaml_step_time"]
        timed[schedule] = 1000 * step_time(workload_of(load_config(source, [key])), DEVICE).line.makespan
    assert timed["gpipe"] > timed["1f1b"] + 100
    assert told["gpipe"] - told["1f1b"] == pytest.approx(timed["gpipe"] - timed["1f1b"])


@dataclass(frozen=True)
class Told:
    """Memory of a stage as a dry run tells it that finds what the formula does, and ``more`` MB on the second stage."""

    stage: Stage
    used_peak: int
    method: str = "told"

    @property
    def actual_peak(self):
        return self.used_peak

    def with_workspace(self, elements):
        return self.used_peak


@pytest.mark.parametrize(
    "options",
    [
        ("--swap",),
        ("--interleave", "1", "2"),
        (
            "--parallel.pipeline_config.pipeline_scheduler=seqpipe",
            "--parallel_config={seq_split_num: 2, micro_batch_num: 8}",
        ),
    ],
    ids=["what waits on the host", "chunks", "pieces"],
)
def test_a_plan_by_formula_is_held_to_the_dry_run_and_corrected(monkeypatch, capsys, options):
    asked = []

    def forecast(config, stages, given):
        asked.append(config)
        sizes = stage_bytes(workload_of(config))
        return [Told(stage, int(sizes[stage.number]) + 6 * GB * (stage.number == 1)) for stage in stages]

    monkeypatch.setattr(validation, "forecast_stages", forecast)
    monkeypatch.setattr(simulations, "simulations_here", Simulations)
    source = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml"
    main(["--config", str(source), "--seconds", "2", "--json", *options])
    found = json.loads(capsys.readouterr().out)
    assert len(asked) >= 2  # what was planned first did not fit
    assert found["confirmed"] or "seqpipe" in options[0]  # of pieces the formula counts a little too much
    assert found["rounds"] - len(asked) in (0, 1)  # a plan that comes back is not asked for again
    assert max(found["dry_run_mb"]) <= 58 * 1024
    assert found["dry_run_mb"][1] > max(found["dry_run_mb"]) - 6 * 1024
    pieces = {config.parallel_config.seq_split_num for config in asked}
    assert pieces == ({2} if "seqpipe" in options[0] else {1})


V = [
    "--parallel.pipeline_config={pipeline_interleave: true, pipeline_scheduler: zero_bubble_v}",
    "--model.model_config={pp_interleave_num: 2, offset: 0}",
    "--recompute_config={recompute: false, select_recompute: true}",
]


def test_a_v_is_planned_written_and_takes_what_the_model_of_time_says(tmp_path, capsys):
    source, output = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml", tmp_path / "planned.yaml"
    order = tmp_path / "order.csv"
    files = ("--no-validate", "--apply", "--output", str(output), "--torch_csv", str(order))
    main(["--config", str(source), *V, "--seconds", "3", "--json", *files])
    told = json.loads(capsys.readouterr().out)
    config = load_config(output)
    workload = workload_of(config)
    assert config.parallel.pipeline_config.v_shape
    assert told["lower_bound"] <= told["step_time"] <= told["even_split_step_time"]
    assert told["yaml_step_time"] > 0
    line = step_time(workload, DEVICE).line
    as_it_is = formula.evaluate_run(config, DEVICE)
    assert as_it_is.step_time == pytest.approx(told["objective"])
    assert told["step_time"] == 1000 * step_time(workload_of(config), DEVICE).seconds
    assert as_it_is.line.makespan == pytest.approx(1000 * line.makespan)
    assert told["peak_memory_mb"] == pytest.approx([size / MIB for size in stage_bytes(workload)])
    assert max(told["peak_memory_mb"]) <= usable_memory(58 * GB) / MIB
    assert [row.count("F") for row in order.read_text().splitlines()] == [64] * 4
    assert all(layer["stage"] == 0 for layer in (told["layers"][0], told["layers"][-1]))


@pytest.mark.parametrize(
    ("scheduler", "pieces", "chunks"), [("seqpipe", 4, 1), ("seqvpp", 2, 2), ("seqsmartvpp", 1, 2)]
)
def test_sequences_in_pieces_are_planned_in_their_order(scheduler, pieces, chunks, tmp_path, capsys):
    """Its step is the model of time's; memory is the formula's or a little more where there are pieces."""
    source, output = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml", tmp_path / "planned.yaml"
    keys = [
        f"--parallel.pipeline_config={{pipeline_interleave: true, pipeline_scheduler: {scheduler}}}",
        f"--model.model_config={{pp_interleave_num: {chunks}, offset: 0}}",
        f"--parallel_config={{seq_split_num: {pieces}, micro_batch_num: 8}}",
        "--recompute_config={recompute: false, select_recompute: true}",
    ]
    written = ["--no-validate", "--apply", "--output", str(output)]
    main(["--config", str(source), *keys, "--seconds", "2", "--json", *written])
    told = json.loads(capsys.readouterr().out)
    config = load_config(output)
    as_it_is, line = formula.evaluate_run(config, DEVICE), step_time(workload_of(config), DEVICE).line
    assert (config.parallel_config.seq_split_num, as_it_is.problem.pieces) == (pieces, pieces)
    assert as_it_is.step_time == pytest.approx(told["objective"])
    assert told["step_time"] == 1000 * step_time(workload_of(config), DEVICE).seconds
    assert as_it_is.line.makespan == pytest.approx(1000 * line.makespan)
    assert told["lower_bound"] <= told["step_time"]
    assert told["step_time"] < told["yaml_step_time"] or not told["yaml_fits"]
    by_formula = [size / MIB for size in stage_bytes(workload_of(config))]
    over = [mine / theirs for mine, theirs in zip(told["peak_memory_mb"], by_formula, strict=True)]
    assert all(1 - 1e-6 <= one < 1.1 for one in over), over
    assert pieces > 1 or over == pytest.approx([1.0] * 4)
    assert max(told["peak_memory_mb"]) <= usable_memory(58 * GB) / MIB


def test_what_waits_on_the_host_is_chosen_beside_recomputation(tmp_path, capsys):
    """Memory and step of the plan are those of the model of time; where there is room nothing is moved."""
    source, output = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml", tmp_path / "planned.yaml"
    options = ["--config", source, "--max_memory", "45GB"]
    kept = planned(capsys, *options)
    told = planned(capsys, *options, "--swap", "--no-validate", "--apply", "--output", output)
    assert told["step_time"] < kept["step_time"]
    assert told["lower_bound"] <= told["objective"] <= (1 + 2e-4) * told["lower_bound"]
    config = load_config(output)
    (moved,) = config.swap_config.op_swap
    names = [layer["recompute"] for layer in told["layers"]]
    assert list(moved.layers) == [number for number, name in enumerate(names) if "host" in name]
    assert "full" in names
    workload = workload_of(config)
    assert told["peak_memory_mb"] == pytest.approx([size / MIB for size in stage_bytes(workload)])
    bare = load_config(output, ["--swap_config={swap: false, op_swap: null, layer_swap: null}"])
    assert max(stage_bytes(workload_of(bare))) > max(stage_bytes(workload))
    makespan = told["objective"] - formula.evaluate_run(bare, DEVICE).problem.exposed_communication
    assert makespan == pytest.approx(1000 * step_time(workload, DEVICE).line.makespan, rel=2e-5)
    assert told["step_time"] == 1000 * step_time(workload, DEVICE).seconds
    roomy = planned(capsys, "--config", source, "--max_memory", "90GB", "--swap")
    assert {layer["stage"] for layer in roomy["layers"] if "host" in layer["recompute"]} == {0}  # the others have room
    assert planned(capsys, "--config", output, "--swap")["yaml_step_time"] is None


def test_a_slow_link_is_waited_for():
    """Copies that take longer than a pass cost what is left of them, so nothing is moved that recomputation gives for less."""
    config = load_config(CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml")
    slow = DEVICE.model_copy(update={"host_bandwidth": DEVICE.host_bandwidth.model_copy(update={"value": 1e8})})
    kinds = [formula.formula_problems(config, device, None, swap=True)[0].layers[0].kinds for device in (DEVICE, slow)]
    hidden, waited = (each["host"].backward - each["none"].backward for each in kinds)
    assert hidden == pytest.approx(1e-5 * kinds[0]["none"].backward, rel=0.01)
    moved = MIB * (kinds[1]["none"].activation_mb - kinds[1]["host"].activation_mb)
    passes = formula.formula_problems(config, slow, None)[0].layers[0].forward + kinds[1]["none"].backward
    assert waited == pytest.approx(2000 * moved / 1e8 - passes, rel=0.01)


def test_a_v_that_is_all_recomputed_computes_it_twice():
    again = "--recompute_config={recompute: true, select_recompute: false}"
    config = load_config(CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml", [*V[:2], again])
    line, workload = formula.evaluate_run(config, DEVICE).line, workload_of(config)
    assert line.makespan == pytest.approx(1000 * step_time(workload, DEVICE).line.makespan)
    peaks = formula.evaluate_run(config, DEVICE).peak_mb
    assert peaks == pytest.approx([size / MIB for size in stage_bytes(workload)])


SELECTED = "{feed_forward\\.mul: [11, 0, 0, 0]}"
WRITTEN = [
    "--model.model_config.offset=[1, 0, 0, -1]",
    "--recompute_config.recompute=[8, 0, 0, 0]",
    f"--recompute_config.select_recompute={SELECTED}",
    "--recompute_config.select_comm_recompute=false",
]


def seconds_between(one, other):
    """What the step of one run takes beyond that of another, by the model of time."""
    first, second = (step_time(workload_of(run), DEVICE).seconds for run in (one, other))
    return first - second


def test_a_plan_is_held_to_the_yaml_as_it_is(capsys, tmp_path):
    """A YAML with layers moved and operators that no plan offers: not the even split is what a plan gains against."""
    source, output, page = (
        CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml",
        tmp_path / "planned.yaml",
        tmp_path / "a.html",
    )
    told = planned(capsys, "--config", source, *WRITTEN)
    config = load_config(source, WRITTEN)
    assert told["yaml_step_time"] != pytest.approx(told["even_split_step_time"])
    assert told["less_time_than_yaml"] == pytest.approx(1 - told["step_time"] / told["yaml_step_time"])
    assert (told["yaml_fits"], len(told["yaml_peak_memory_mb"])) == (True, 4)
    assert told["yaml_peak_memory_mb"] == pytest.approx([size / MIB for size in stage_bytes(workload_of(config))])
    files = ["--no-validate", "--apply", "--output", str(output), "--picture", str(page)]
    main(["--config", str(source), *files, *WRITTEN])
    text = capsys.readouterr().out
    gain = f"{100 * told['less_time_than_yaml']:.2f}% less time than the YAML as it is"
    assert "before: the YAML as it is, step" in text
    assert "8 full, 3 as written" in text.partition("after: the plan")[0]
    assert f"wrote {output}: {gain}" in text
    assert gain in page.read_text(encoding="utf-8")
    saved = 1e-3 * (told["yaml_step_time"] - told["step_time"])
    assert seconds_between(config, load_config(output)) == pytest.approx(saved)


def test_a_yaml_that_cannot_be_judged_is_said_to_be_unknown(capsys, monkeypatch):
    """A pipeline that reaches no steady state."""

    def unsteady(problem, plan):
        raise NotSteady

    monkeypatch.setattr(formula, "evaluate", unsteady)
    source = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml"
    main(["--config", str(source), "--no-validate"])
    text = capsys.readouterr().out
    assert "the YAML as it is cannot be evaluated" in text
    assert "before: even split" in text
    assert planned(capsys, "--config", source)["yaml_step_time"] is None


def test_a_yaml_that_does_not_fit_is_said_to(capsys):
    source = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml"
    none = [f"--recompute_config.{key}=false" for key in ("recompute", "select_recompute")]
    options = ["--config", str(source), "--no-validate", "--max_memory", "40GB", *none]
    main(options)
    assert "more time than the YAML as it is, which does not fit: " in capsys.readouterr().out
    main([*options, "--json"])
    assert json.loads(capsys.readouterr().out)["yaml_fits"] is False


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--problem", "problem.json", "--swap"], "--swap requires a run"),
        (
            ["--config", "CONFIG", "--model.model_config.num_nextn_predict_layers=2", OFFSET],
            "num_nextn_predict_layers: all of them must be on the last stage",
        ),
        (
            ["--config", "CONFIG", *ALONE],
            "pipeline_stage: is 1: there is no pipeline to plan",
        ),
        (
            ["--config", "CONFIG", "--swap_config.swap=true"],
            "swap_config.swap: a plan chooses recomputation, not what waits on the host (value true); write false, or",
        ),
        (
            ["--config", "CONFIG", "--swap", "--interleave", "1", "2"],
            "pp_interleave_num: --swap requires one chunk per stage (value 2)",
        ),
        (
            ["--config", "CONFIG", "--swap", "--parallel.pipeline_config.pipeline_scheduler=gpipe"],
            "pipeline_scheduler: --swap requires 1f1b (value gpipe)",
        ),
        (
            ["--config", "CONFIG", "--swap", "--device", "atlas_900_a3"],
            "has no host_bandwidth, which the copies of swap_config need",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, expected, capsys):
    source = str(CONFIGS / "deepseek/pretrain_deepseek_v3_671b.yaml")
    with pytest.raises(SystemExit) as ended:
        run_command(main, [source if argument == "CONFIG" else argument for argument in arguments])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_the_former_option_has_no_effect_and_says_so(capsys):
    config = ["--config", str(CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml"), "--no-validate", "--seconds", "5"]
    main(config)
    text = capsys.readouterr().out
    main([*config, "--formula"])
    printed = capsys.readouterr()
    assert "--formula is deprecated" in printed.err
    assert re.sub(r"solved in .*", "", printed.out) == re.sub(r"solved in .*", "", text)


SOURCE = CONFIGS / "llama2/pretrain_llama2_13b_16p.yaml"
UNEVEN = ["--model.model_config.offset=[2, 0, 0, -2]", "--recompute_config={recompute: true, select_recompute: false}"]


def test_steps_are_those_of_time_and_gains_those_of_the_steps_shown(tmp_path, capsys):
    """Of stages so uneven that the planner's objective is another."""
    output = tmp_path / "planned.yaml"
    told = planned(capsys, "--config", SOURCE, *UNEVEN, "--no-validate", "--apply", "--output", output)
    before, after = (predict(run, DEVICE).seconds for run in (load_config(SOURCE, UNEVEN), load_config(output)))
    assert (told["yaml_step_time"], told["step_time"]) == (1000 * before, 1000 * after)
    assert told["less_time_than_yaml"] == 1 - after / before
    assert told["gap"] == pytest.approx(told["objective"] / told["lower_bound"] - 1)
    main(["--config", str(SOURCE), *UNEVEN, "--no-validate", "--seconds", "20", "--interleave", "1"])
    text = capsys.readouterr().out
    shown = re.search(r"step ([\d,.]+) -> ([\d,.]+) ms: ([\d.]+)% less time than the YAML as it is", text)
    then, now, less = (float(number.replace(",", "")) for number in shown.groups())
    assert less == pytest.approx(100 * (1 - now / then), abs=0.006)
    (stage,) = re.findall(r"^ +0 +12 .* ([\d.]+)%$", text.partition("after: the plan")[0], re.MULTILINE)
    busy = step_time(workload_of(load_config(SOURCE, UNEVEN)), DEVICE).line.busy()[0]
    assert float(stage) == pytest.approx(100 * (1 - busy / before), abs=0.06)


@pytest.mark.parametrize(("share", "fits"), [(0.97, False), (0.94, True)])
def test_one_margin_decides_in_all_commands(share, fits, tmp_path, capsys):
    """A YAML that needs this share of the limit."""
    needed = max(stage_bytes(workload_of(load_config(SOURCE)))) / GB
    limit = f"--context.max_device_memory={needed / share:.3f}GB"
    config = load_config(SOURCE, [limit])
    assert planned(capsys, "--config", SOURCE, limit)["yaml_fits"] == fits
    assert predict(config, DEVICE).fits == fits
    assert prove_run(config, Options(), quick=True).answer("memory").figures["fits"] == fits
    assert evaluate_current(config, DEVICE).room(memory_limit(config, DEVICE)).fits == fits
    assert main(["--config", str(SOURCE), "--no-validate", limit]) == 0
    assert f"limit {needed / share:.2f} GB, 5% reserved: {0.95 * needed / share:.2f} GB" in capsys.readouterr().out


def test_what_would_fit_is_said_with_the_margin(capsys):
    with pytest.raises(CheckFailed) as failed:
        main(["--config", str(SOURCE), "--max_memory", "15GB"])
    size = re.search(r"with 5% reserved that is --max_memory ([\d.]+GB)", str(failed.value))[1]
    assert max(planned(capsys, "--config", SOURCE, "--max_memory", size)["peak_memory_mb"]) > 15 * 1024 * 0.95


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "; validated by the dry run"), (("--no-validate",), "; not validated by a dry run (--no-validate)")],
)
def test_a_plan_that_is_applied_is_validated_or_said_not_to_be(options, said, tmp_path, monkeypatch, capsys):
    simulated = []

    def forecast(config, stages, given):
        simulated.append(config)
        sizes = stage_bytes(workload_of(config))
        return [Told(stage, int(sizes[stage.number])) for stage in stages]

    monkeypatch.setattr(validation, "forecast_stages", forecast)
    output = tmp_path / "planned.yaml"
    main(["--config", str(SOURCE), "--apply", "--output", str(output), *options])
    assert capsys.readouterr().out.splitlines()[-1].endswith(said)
    assert bool(simulated) == (options == ())
    assert output.is_file()


def test_a_problem_whose_plan_does_not_fit_a_run_is_not_written(tmp_path, monkeypatch, capsys):
    (problem,) = formula.formula_problems(load_config(SOURCE), DEVICE, None)
    path, output = tmp_path / "problem.json", tmp_path / "planned.yaml"
    path.write_text(problem.model_dump_json(exclude={"name"}))

    def forecast(config, stages, given):
        return [Told(stage, 60 * GB) for stage in stages]

    monkeypatch.setattr(validation, "forecast_stages", forecast)
    with pytest.raises(CheckFailed, match=r"the plan needs 60\.0 GB on stage 0, 2\.0 GB more than the limit of 58 GB"):
        main(["--problem", str(path), "--apply", str(SOURCE), "--output", str(output)])
    assert not output.exists()
    main(["--problem", str(path), "--no-validate", "--apply", str(SOURCE), "--output", str(output)])
    assert output.is_file()
