"""The commands of step times: tables, timelines, calibration from one's own steps, strategies and their search."""

import json
import runpy
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from kept_programs_here import unpacked

from mindllm.cli.search import main as tune
from mindllm.cli.time import main, read_measured
from mindllm.config import load_config, override_config
from mindllm.errors import CheckFailed, UserError
from mindllm.planning.costs.formula import plan_problem
from mindllm.strategies.candidates import candidates, read_candidate
from mindllm.strategies.search import pareto, search
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.stage_times import stage_times
from mindllm.timing.step import step_time
from mindllm.timing.timeline import events
from mindllm.timing.what_if import changes
from mindllm.units import GIB
from toolkit.benchmark.published_steps import atlas, even_plan, korthikanti, read_atlas, read_rows, vtrain
from toolkit.benchmark.step_time import errors, korthikanti_table
from toolkit.benchmark.sweep.figures import left_out
from toolkit.benchmark.zero_bubble_steps import place_shares, sends

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "configs/llama2/pretrain_llama2_13b_16p.yaml")
TINY = str(ROOT / "configs/llama2/pretrain_llama2_tiny.yaml")
DATA = Path(__file__).parents[1] / "ground_truth"
DEVICE = read_device(DEFAULT)


@pytest.fixture(scope="module")
def run():
    return load_config(RUN)


@pytest.fixture(scope="module")
def step(run):
    return step_time(workload_of(run), DEVICE)


def test_the_parts_of_every_stage_make_up_the_step(step):
    for one in stage_times(step):
        parts = sum(one.compute.values()) + sum(one.exchanged.values()) + one.sends
        assert parts + one.replicas + one.update + one.bubble == pytest.approx(step.seconds)
        assert one.bubble > 0


def test_changes_make_a_step_shorter(step):
    found = changes(step)
    assert set(found) >= {"HCCS 2 times as fast", "stages in perfect balance", "no bubble at all"}
    assert all(seconds <= step.seconds * (1 + 1e-9) for seconds in found.values())
    assert found["nothing recomputed (memory aside)"] < 0.95 * step.seconds


def test_a_timeline_holds_every_pass_and_the_memory_of_every_stage(step):
    found = list(events(step))
    passes = [event for event in found if event["ph"] == "X" and event["name"].startswith(("forward", "backward"))]
    strategy = step.workload.strategy
    assert len(passes) == 2 * strategy.micro_batches * strategy.pipeline_stage
    assert {event["pid"] for event in found if event["ph"] == "C"} == set(range(strategy.pipeline_stage))
    assert max(event["ts"] + event["dur"] for event in passes) == pytest.approx(1e6 * step.line.makespan)


def test_the_command_prints_the_step_as_json(capsys, tmp_path, step):
    trace = tmp_path / "trace.json"
    assert main(["--config", RUN, "--json", "--explain", "--timeline", str(trace)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seconds"] == pytest.approx(step.seconds)
    assert len(answer["stages"]) == 4
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_the_command_prints_a_line_for_each_stage(capsys):
    assert main(["--config", RUN, "--zero_shot", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "tokens/s/device" in text
    assert "one change alone" in text
    assert "from the architecture" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "b200"), "neither a file nor one of the described devices"),
        (("--model.model_config.compute_dtype=float64",), "compute_dtype"),
    ],
)
def test_what_cannot_be_predicted_is_refused(arguments, said):
    with pytest.raises(UserError, match=said):
        main(["--config", RUN, *arguments])


def test_a_device_is_calibrated_from_steps_of_ones_own_runs(capsys, tmp_path, run):
    rows = []
    for number, size in enumerate((1, 2, 4)):
        path = tmp_path / f"run{number}.yaml"
        path.write_text(f"base: {RUN}\nrunner_config:\n  batch_size: {size}\n", encoding="utf-8")
        config = load_config(path)
        rows.append(f"{path.name},{1.2 * step_time(workload_of(config), DEVICE).seconds}")
    measured = tmp_path / "steps.csv"
    measured.write_text("config,seconds\n" + "\n".join(rows) + "\n", encoding="utf-8")
    written = tmp_path / "mine.yaml"
    assert main(["calibrate", "--measured", str(measured), "--output", str(written)]) == 0
    assert "left out: mean" in capsys.readouterr().out
    again = step_time(workload_of(run), read_device(str(written))).seconds
    assert again / step_time(workload_of(run), DEVICE).seconds == pytest.approx(1.2, abs=0.02)


def test_a_step_is_read_from_a_profile(tmp_path):
    (tmp_path / "run.yaml").write_text(f"base: {RUN}\n", encoding="utf-8")
    (tmp_path / "step_trace_time.csv").write_text(
        "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free\n"
        "0,1,9000000,9,0,9,9\n0,2,1000000,200000,5,200005,300000\n0,3,1000000,200000,5,200005,500000\n",
        encoding="utf-8",
    )
    (tmp_path / "steps.csv").write_text("config,profile\nrun.yaml,.\nrun.yaml,step_trace_time.csv\n", encoding="utf-8")
    assert [row.seconds for row in read_measured(tmp_path / "steps.csv")] == [pytest.approx(1.6)] * 2  # not the first
    (tmp_path / "step_trace_time.csv").write_text("Step,Compute\n1,2\n", encoding="utf-8")
    with pytest.raises(UserError, match="another version"):
        read_measured(tmp_path / "steps.csv")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config\nrun.yaml\n", "requires the columns config and seconds"),
        ("config,seconds\nrun.yaml,1\n", "has one row"),
        ("config,seconds\nrun.yaml,1\nrun.yaml,-1\n", ":3: seconds must be a positive number|run.yaml"),
    ],
)
def test_measured_steps_that_make_no_sense_are_refused(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(f"base: {RUN}\n", encoding="utf-8")
    (tmp_path / "steps.csv").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        main(["calibrate", "--measured", str(tmp_path / "steps.csv"), "--output", str(tmp_path / "device.yaml")])
    assert not (tmp_path / "device.yaml").exists()


def test_published_rows_are_predicted_without_calibration():
    """A smaller bound than the benchmark's page: the whole table is made there."""
    _, _, lines = korthikanti_table(DATA)
    mean = float(lines[-1][-1].split("/")[0])
    assert mean < 2.5
    assert len(lines) == 9


def test_every_published_row_is_read():
    rows = read_rows(DATA / "throughput.csv")
    known = [found for row in rows if (found := atlas(row))]
    assert len(known) == len(rows)
    dense = [one for one in known if one.workload.strategy.expert_parallel == 1]
    assert abs(errors(dense, DEVICE)).mean() < 0.1
    assert abs(errors(known, DEVICE)).max() < 0.3, "the mixture of experts, which nothing was fitted to, among them"
    cluster = vtrain(read_rows(DATA / "vtrain_multi_node_a100.csv")[0]).workload
    assert cluster.strategy.device_num == 64
    assert cluster.architecture.head.tied
    assert cluster.numerics.adds_gradients
    assert [one.name for one in korthikanti(read_rows(DATA / "korthikanti_step_time.csv")[0])] == [
        "22B, full",
        "22B, selective",
    ]
    shares = place_shares(read_rows(DATA / "zero_bubble.csv")[0], read_device("a100_80g"), 3, 8)
    assert shares.sum() == pytest.approx(8)
    assert shares[0] < shares[1]


def test_sends_between_nodes_take_longer_than_the_measured_mean():
    two_nodes, one = (read_rows(DATA / "zero_bubble.csv")[number] for number in (6, 0))
    found = sends(two_nodes, read_device("a100_80g"), 48)
    assert found[:15].mean() == pytest.approx(float(two_nodes["Tcomm"]))
    assert found[7] == pytest.approx(found[15]), "the other node, and back to the first stage"
    assert found[7] > 5 * found[0]
    assert sends(one, read_device("a100_80g"), 24) == pytest.approx(float(one["Tcomm"]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ep": "8"}, "mixture of experts of unknown routing"),
        ({"offset": "3"}, "sums to"),
        ({"recompute": "full=7 sel=False"}, "Recompute"),
    ],
)
def test_a_published_row_that_is_not_predicted_says_why(changes, said):
    assert said in str(read_atlas({**read_rows(DATA / "throughput.csv")[1], **changes}))


def test_recomputation_of_a_published_row_is_read_with_nested_lists():
    row = next(row for row in read_rows(DATA / "throughput.csv") if row["model"] == "yi_34b")
    chunked = {"pp_interleave_num": "2", "offset": "[[0, 1, 1, 0], [1, 1, 0, 0]]"}
    found = atlas({**row, **chunked, "recompute": "full=[[1, 0, 0, 0], [0, 0, 0, 2]] sel=True comm=False"})
    again = [(layer.chunk, layer.stage) for layer in found.workload.plan.layers if layer.recompute]
    assert again == [(0, 0), (1, 3), (1, 3)]


def test_strategies_divide_devices_batch_and_heads(run):
    left_out = Counter()
    found = list(candidates(run, 16, 64, DEVICE, left_out))
    assert len({one.name for one in found}) == len(found) > 50
    for one in found:
        assert one.data_parallel * one.sharing.ranks * one.model_parallel * one.pipeline_stage == 16
        assert one.data_parallel * one.micro_batch_size * one.micro_batches == 64
        assert 40 % one.model_parallel == 0
        assert one.pipeline_stage == 1 or one.micro_batches >= one.pipeline_stage
    assert left_out["tensor-parallel ranks of several nodes"] == 1


def test_experts_are_shared_in_every_way_that_divides_them():
    """Eight experts on 16 devices: whole ones of one rank each, or split as dense weights are, in groups of whole replicas."""
    mixture = load_config(ROOT / "configs/mixtral/pretrain_mixtral_8x7b.yaml")
    found = [one for one in candidates(mixture, 16, 64, DEVICE, Counter()) if one.pipeline_stage == 1]
    of_pairs = {(one.expert_parallel, one.expert_model_parallel) for one in found if one.model_parallel == 2}
    assert of_pairs == {(2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2)}
    for one in found[:: len(found) // 8]:
        assert override_config(mixture, {**one.overrides(), "recompute_config.recompute": True}).global_batch_size == 64
        assert step_time(
            replace(workload_of(mixture), strategy=one.strategy(mixture), plan=even_plan(32, 1, 1, True)), DEVICE
        )


def small(run):
    """Eight layers, all of them recomputed."""
    plain = {"model.model_config.num_layers": 8, "model.model_config.offset": 0}
    plain |= {"recompute_config.recompute": True, "recompute_config.select_recompute": False}
    return override_config(run, plain)


def test_a_search_goes_on_where_it_was(tmp_path, run):
    first = search(small(run), 4, 8, DEVICE, 58 * GIB, tmp_path)
    lines = (tmp_path / "candidates.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "candidates.jsonl").write_text("\n".join(lines[:-2]) + '\n{"run": "cut', encoding="utf-8")
    again = search(small(run), 4, 8, DEVICE, 58 * GIB, tmp_path)
    assert again.judged == first.judged
    assert again.reused == first.tried - 2
    front = pareto(first.judged)
    assert front[0] == first.judged[0]
    assert all(max(low.memory) < max(high.memory) for high, low in pairwise(front))


def test_sequences_are_shared_where_a_run_may_share_them(run):
    """Balanced where that changes something; in a pipeline in a ring alone, and heads only as far as they go round."""
    wanted = [*candidates(small(run), 16, 8, DEVICE, Counter())]
    shared = [one for one in wanted if one.sharing.ranks > 1]
    assert {one.pipeline_stage for one in shared if not one.sharing.ring} == {1}
    assert {one.sharing.balanced for one in shared if one.pipeline_stage > 1} == {False}
    assert {one.micro_batch_size for one in shared} == {1}
    forms = {(one.sharing.heads, one.sharing.balanced, one.sharing.ring) for one in shared if one.pipeline_stage == 1}
    assert forms == {(False, True, False), (True, False, False), (False, True, True)}
    assert all(8 % (one.model_parallel * one.sharing.ranks) == 0 for one in shared if one.sharing.heads)
    assert {one.data_parallel * one.sharing.ranks * one.model_parallel * one.pipeline_stage for one in wanted} == {16}
    one = next(one for one in shared if one.sharing.heads)
    strategy = workload_of(override_config(small(run), one.overrides())).strategy
    assert strategy == one.strategy(small(run))
    assert read_candidate(one.tree()) == one


def test_sequences_of_a_mixture_stay_whole(run):
    experts = {"model_type": "mixtral", "expert_num": 4, "num_experts_chosen": 2}
    mixture = override_config(small(run), {f"model.model_config.{key}": value for key, value in experts.items()})
    wanted = [*candidates(mixture, 16, 8, DEVICE, Counter())]
    assert wanted
    assert {one.sharing.ranks for one in wanted} == {1}


def test_the_best_strategy_is_written_as_a_run_and_beats_the_yaml(capsys, tmp_path, run):
    written = tmp_path / "tuned.yaml"
    given = tmp_path / "run.yaml"
    given.write_text(
        f"base: {RUN}\nmodel:\n  model_config:\n    num_layers: 8\n    offset: 0\n"
        "recompute_config:\n  recompute: true\n  select_recompute: false\n",
        encoding="utf-8",
    )
    options = ["--config", str(given), "--devices", "16", "--best", "2", "--seconds", "2", "--output", str(tmp_path)]
    assert tune([*options, "--apply", str(written), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    best = answer["best"][0]
    assert best["tokens_per_second_per_device"] > answer["yaml"]["tokens_per_second_per_device"]
    found = load_config(written)
    assert found.parallel_config.device_num == 16
    assert found.global_batch_size == load_config(given).global_batch_size
    assert step_time(workload_of(found), DEVICE).seconds == pytest.approx(best["seconds"])
    assert "<svg" in (tmp_path / "strategies.html").read_text(encoding="utf-8")


def test_a_run_that_fits_no_device_is_a_check_that_says_no(tmp_path, run):
    with pytest.raises(CheckFailed, match="fits 1 GB"):
        tune(["--config", RUN, "--devices", "2", "--global_batch", "2", "--context.max_device_memory=1GB",
              "--output", str(tmp_path)])  # fmt: skip


def test_the_planner_judges_a_problem_of_the_architecture_as_the_model_of_time_does(run):
    """Same places, nothing recomputed: the simulator's step is the model's, in milliseconds."""
    from mindllm.planning.plan import Plan, evaluate

    config = override_config(small(run), {"recompute_config.recompute": False})
    workload = workload_of(config)
    problem = plan_problem(workload, DEVICE, 58.0 * GIB, "run")
    plan = Plan((("none", "none"),) * 4)
    predicted = step_time(workload, DEVICE)
    assert evaluate(problem, plan).line.makespan == pytest.approx(1e3 * predicted.line.makespan)


def test_the_tuning_ladder_of_llama2_13b_is_replayed_in_order():
    """Published: each rung faster than the one before, 37% in all."""
    rungs = runpy.run_path(str(ROOT / "research/llama2_13b_tuning/replay.py"))["rungs"]()
    predicted = [step.tokens_per_device for _, _, step in rungs]
    assert predicted == sorted(predicted)
    published = [speed for _, speed, _ in rungs]
    assert predicted[-1] / predicted[0] == pytest.approx(published[-1] / published[0], abs=0.05)


def test_a_program_of_somebody_is_timed_from_its_kept_graphs(tmp_path, capsys):
    directory = str(unpacked("mlp_b", tmp_path))
    assert main(["--simulated", directory, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, last = found["stages"]
    assert (first["layers"], last["layers"], found["micro_batches"]) == (1, 3, 4)
    assert last["forward"] == pytest.approx(3 * first["forward"], rel=0.4)
    assert last["recomputed"] == pytest.approx(
        3 * first["recomputed"], rel=0.3
    )  # of the first stage, its batch is cut again
    busiest = 4 * (last["forward"] + last["recomputed"] + last["backward"])
    assert found["seconds"] > busiest
    assert found["schema"] == 2
    assert first["waits"] > last["waits"]
    assert main(["--simulated", directory]) == 0
    assert "passes in the order of 1F1B" in capsys.readouterr().out
    with pytest.raises(UserError, match="--explain requires a run"):
        main(["--simulated", directory, "--explain"])
    with pytest.raises(UserError, match="--simulated has no keys of a run"):
        main(["--simulated", directory, "--model.model_config.num_layers=4"])


@pytest.mark.parametrize(
    ("pet", "named"), [("{lora_rank: 8}", ""), ("{pet_type: galore, galore_rank: 8}", "QR of GaLore")]
)
def test_what_a_prediction_leaves_out_is_said_wherever_its_seconds_are(pet, named, capsys):
    given = ["--config", TINY, f"--model.model_config.pet_config={pet}"]
    main(given)
    assert ("not counted" in capsys.readouterr().out) == bool(named)
    main([*given, "--json"])
    printed = capsys.readouterr().out
    assert named in " ".join(json.loads(printed)["not_counted"])
    assert left_out(printed).startswith("step_s leaves out QR of GaLore" if named else "")
    assert bool(left_out(printed)) == bool(named)
