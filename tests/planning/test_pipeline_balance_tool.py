"""python -m toolkit.pipeline_balance: answers, files, measured memories, and mistakes told with exit code 2."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from planning_problems import random_problem

from mindllm.cli.plan import main
from mindllm.command import run_command
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import make_plan
from mindllm.planning.costs.measured import fit_memory, read_measured
from mindllm.planning.plan import evaluate
from mindllm.planning.read_problem import Setting
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.solve import Infeasible, solve

DATA = Path(__file__).parents[1] / "ground_truth"
LAYERS = str(DATA / "sapp_test_96_layers.json")
KEYS = {
    "offset", "recompute", "select_recompute", "select_comm_recompute", "step_time", "lower_bound", "gap",
    "solve_seconds", "even_split_step_time", "peak_memory_mb",
}  # fmt: skip


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(random_problem(3, 4, 16, 5, 16).model_dump_json())
    return path


def refused(capsys, *arguments, code=2):
    """The one message of a command that must end with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        run_command(main, [str(argument) for argument in arguments])
    assert ended.value.code == code
    return capsys.readouterr().err


def test_json_is_the_answer_alone(problem_file, capsys):
    main(["--problem", str(problem_file), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= KEYS
    assert found["gap"] <= 1e-4
    assert len(found["layers"]) == 16
    assert found["lower_bound"] <= found["step_time"] <= found["even_split_step_time"]


def test_the_tables_the_lists_and_the_reasons_are_printed(problem_file, capsys):
    main(["--problem", str(problem_file), "--explain", "--seconds", "4"])
    text = capsys.readouterr().out
    for words in ("before: even split", "after: the plan", "lower bound of all plans", "offset: [", "one more GB"):
        assert words in text


def test_a_plan_is_written_into_a_run_that_reads_it_back(problem_file, tmp_path, capsys):
    run = tmp_path / "run.yaml"
    base = Path(__file__).parents[2] / "configs" / "llama2" / "pretrain_llama2_7b.yaml"
    sizes = {"model": {"model_config": {"num_layers": 16}}, "parallel_config": {"pipeline_stage": 4}}
    sizes["runner_config"] = {"gradient_accumulation_steps": 1}
    run.write_text(yaml.safe_dump({"base": str(base), **sizes}))
    lists, planned = tmp_path / "lists.yaml", tmp_path / "planned.yaml"
    main([
        "--problem", str(problem_file), "--json", "--yaml", str(lists), "--apply", str(run), "--output", str(planned),
        "--no-validate",
    ])  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    written = load_config(planned)
    plan = make_plan(written)
    assert written.parallel_config.micro_batch_num == 16
    assert [layer.stage for layer in plan.layers] == [layer["stage"] for layer in found["layers"]]
    assert [layer.recompute for layer in plan.layers] == [layer["recompute"] == "full" for layer in found["layers"]]
    assert yaml.safe_load(lists.read_text())["offset"] == found["offset"]


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")])
def test_pictures(problem_file, tmp_path, ending, start, capsys):
    path = tmp_path / f"schedule.{ending}"
    main(["--problem", str(problem_file), "--picture", str(path)])
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 10_000


def test_manual_plans_are_judged_like_our_own(problem_file, tmp_path, capsys):
    main(["--problem", str(problem_file), "--json"])
    own = json.loads(capsys.readouterr().out)
    lists = {key: own[key] for key in ("offset", "recompute", "select_recompute", "select_comm_recompute")}
    manual = tmp_path / "manual.yaml"
    manual.write_text(yaml.safe_dump({"mine": lists, "all": {"offset": 0, "recompute": True}}))
    main(["--problem", str(problem_file), "--manual", str(manual), "--json"])
    judged = json.loads(capsys.readouterr().out)["plans"]
    assert judged["mine"]["step_time"] == own["step_time"]
    assert judged["mine"]["fits"]
    manual.write_text(yaml.safe_dump({"mine": {"offset": [1, 0, 0]}}))
    assert "mine: offset: needs 4 numbers" in refused(capsys, "--problem", problem_file, "--manual", manual)
    manual.write_text(yaml.safe_dump({"mine": {"offsets": 0}}))
    assert "did you mean 'offset'" in refused(capsys, "--problem", problem_file, "--manual", manual)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 0}, "stages: "),
        ({"stages": 40}, "16 layers cannot fill 40 stages"),
        ({"limit_mb": [1, 2]}, "limit_mb has 2 entries for 4 stages"),
        ({"point_to_point": -1}, "point_to_point"),
        ({"colour": "red"}, "colour"),
        ({"layers": []}, "layers"),
    ],
)
def test_a_wrong_problem_is_told(problem_file, capsys, change, words):
    fields = json.loads(problem_file.read_text())
    problem_file.write_text(json.dumps({**fields, **change}))
    said = refused(capsys, "--problem", problem_file)
    assert words in said
    assert str(problem_file) in said


def test_files_that_are_no_problems_are_told(tmp_path, capsys):
    path = tmp_path / "problem.json"
    assert "No such file" in refused(capsys, "--problem", path)
    path.write_text("{")
    assert "not JSON" in refused(capsys, "--problem", path)
    path.write_text("[]")
    assert "must hold an object" in refused(capsys, "--problem", path)
    assert "give --stages" in refused(capsys, "--problem", LAYERS)
    several = DATA / "planner_instances.json"
    assert "choose one with --instance" in refused(capsys, "--problem", several)
    assert "did you mean 'pp16-mb64-4k'" in refused(capsys, "--problem", several, "--instance", "pp16-mb64")


def test_what_does_not_fit_says_what_would(capsys):
    arguments = ["--problem", LAYERS, "--stages", "16", "--micro_batches", "32", "--max_memory"]
    said = refused(capsys, *arguments, "12000MB", code=3)
    assert "1.07 GB higher (12.79 GB there)" in said
    main([*arguments, "12.79GB", "--json"])  # what it says does
    capsys.readouterr()
    main([*arguments, "13095MB", "--json"])
    capsys.readouterr()
    assert "fits the memory" in refused(capsys, *arguments, "13094MB", code=3)


def test_the_smallest_limit_is_the_border():
    for seed in range(12):
        chunks = 1 + seed % 2
        problem = random_problem(seed, 3, 9, 3, 6, chunks, layer_kinds=1 + seed % 3 // 2)
        working = random_problem(seed, 3, 9, 3, 6, working=True)  # full recomputation keeps least, and may need most
        assert solve(working.with_limit(lightest_split(working.with_limit(0)).missing_mb + 0.01), 1).best.fits
        border = problem.with_limit(0)
        limit = lightest_split(border).missing_mb
        assert solve(border.with_limit(limit + 0.01), 1).best.fits
        with pytest.raises(Infeasible):
            solve(border.with_limit(limit - 0.1), 1)


def init_yaml(path, problem, plan, lists):
    """What a user would have measured of a plan, in the public planner's form."""
    peaks = [float(peak) for peak in evaluate(problem, plan).peak_mb]
    body = {"stage_id": list(range(1, len(peaks) - 1)), "memories": peaks[1:-1]}
    fields = {
        "pipeline_config": {
            "pipeline_num": problem.stages,
            "num_layer": problem.layer_count,
            "offset": lists["offset"],
        },
        "recompute_config": {key: value for key, value in lists.items() if key != "offset"},
        "memory_usage": {"head_memory": peaks[0], "tail_memory": peaks[-1], "body_memories": body},
        "time_config": {"head": 3, "body": 10, "tail": 9},
    }
    path.write_text(yaml.safe_dump(fields))
    return path


def measured_problem(stages, layers):
    from mindllm.planning.problem import make_problem

    memory = {"none": 800, "select": 600, "comm": 500, "both": 330, "full": 40}
    kinds = {name: {"backward": 20, "activation_mb": value} for name, value in memory.items()}
    body = {"name": "body", "count": layers, "forward": 10, "parameter_mb": 900, "kinds": kinds}
    ends = {"head": {"memory_mb": 2000}, "tail": {"memory_mb": 3000}}
    fields = {"stages": stages, "micro_batches": 16, "layers": [body], "static_mb": 700, **ends}
    return make_problem(fields, "measured")


def test_measured_stages_give_back_the_memory_they_are_made_of(tmp_path):
    from mindllm.planning.yaml_plan import read_yaml_plan

    problem = measured_problem(12, 60)
    lists = {
        "offset": [1, -2, 0, 2, -1, 1, 0, -1, 2, -2, 1, -1],
        "recompute": [1, 0, 2, 1, 0, 3, 1, 0, 2, 0, 1, 2],
        "select_recompute": [3, 2, 3, 5, 1, 4, 2, 2, 4, 1, 5, 3],
        "select_comm_recompute": [1, 1, 4, 3, 3, 3, 4, 1, 2, 3, 2, 4],
    }
    plan = read_yaml_plan(problem, lists)
    path = init_yaml(tmp_path / "init.yaml", problem, plan, lists)
    found, fit = read_measured([path], Setting(micro_batches=16))
    assert fit.margin_mb < 1e-3
    assert evaluate(found, plan).peak_mb == pytest.approx(evaluate(problem, plan).peak_mb, abs=0.01)
    assert fit.values["parameter"] == pytest.approx(900, abs=0.01)
    assert fit.values["constant"] == pytest.approx(700, abs=0.1)


def test_two_stages_can_be_measured_in_several_runs(tmp_path, capsys):
    from mindllm.planning.yaml_plan import read_yaml_plan

    problem, paths = measured_problem(2, 8), []
    for number, (offset, recompute) in enumerate([([0, 0], [2, 2]), ([1, -1], [0, 3]), ([-1, 1], [3, 0])]):
        lists = {"offset": offset, "recompute": recompute}
        plan = read_yaml_plan(problem, lists)
        paths.append(init_yaml(tmp_path / f"run{number}.yaml", problem, plan, lists))
    found, fit = read_measured(paths, Setting(micro_batches=16))
    assert fit.margin_mb < 1e-3
    assert evaluate(found, plan).peak_mb == pytest.approx(evaluate(problem, plan).peak_mb, abs=0.01)
    said = refused(capsys, "--measured", paths[0], "--micro_batches", 16)
    assert "add a run" in said


def test_noise_of_measurements_becomes_a_margin(tmp_path):
    """Sixteen peaks that a dry run printed for 96 layers with mixed recomputation."""
    lists = {
        "offset": [0, 0, -4, -2, 2, -2, -2, 10, -2, -2, -2, 0, 2, 2, 0, 0],
        "select_recompute": [5, 5, 2, 1, 4, 3, 2, 14, 4, 4, 4, 6, 1, 5, 5, 6],
        "select_comm_recompute": [0, 5, 0, 1, 1, 4, 2, 2, 1, 3, 2, 6, 4, 5, 5, 1],
    }
    peaks = [
        96643,
        60854,
        27620,
        54533,
        100631,
        31713,
        38874,
        146986,
        31713,
        24553,
        24553,
        28484,
        45016,
        33763,
        20463,
        23531,
    ]
    body = {"stage_id": list(range(1, 15)), "memories": peaks[1:-1]}
    fields = {
        "pipeline_config": {"pipeline_num": 16, "num_layer": 96, "offset": lists["offset"]},
        "recompute_config": {key: lists[key] for key in ("select_recompute", "select_comm_recompute")},
        "memory_usage": {"head_memory": peaks[0], "tail_memory": peaks[-1], "body_memories": body},
        "time_config": {"head": 3, "body": 10, "tail": 9},
    }
    path = tmp_path / "init.yaml"
    path.write_text(yaml.safe_dump(fields))
    found, fit = read_measured([path], Setting(micro_batches=16))
    left = fit.residuals[0][1]
    assert np.abs(left[[0, -1]]).max() < 1  # head and tail take the constant into account
    assert np.mean(np.abs(left) / peaks) < 0.02
    assert fit.margin_mb == pytest.approx(left.max())
    assert found.per_stage("static_mb")[0] == pytest.approx(fit.values["constant"] + fit.margin_mb)


def test_runs_that_tell_nothing_apart_are_refused(tmp_path):
    from mindllm.planning.costs.measured import Run

    flat = Run("flat.yaml", np.full(4, 9000.0), np.array([[4, 0, 0, 0, 0]] * 4), np.array([4, 3, 2, 1]), {})
    with pytest.raises(UserError, match="do not determine"):
        fit_memory([flat])


def test_a_layer_file_that_counts_layers_twice_differently_is_refused(tmp_path, capsys):
    content = json.loads(Path(LAYERS).read_text(encoding="utf-8"))
    content["layers_description"][1]["nb_layer"] = 192
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    said = refused(capsys, "--problem", path, "--stages", 8, "--micro_batches", 32)
    assert "auto_partition_layer has 96 layers, nb_layer 192" in " ".join(said.split())


@pytest.mark.parametrize("file", ["own", "sapp"])
def test_integers_of_thousands_of_digits_are_refused(problem_file, tmp_path, capsys, file):
    path, huge = tmp_path / "huge.json", "1" + "0" * 5000
    text = problem_file.read_text(encoding="utf-8") if file == "own" else Path(LAYERS).read_text(encoding="utf-8")
    key = "forward" if file == "own" else "time"
    head, tail = text.split(f'"{key}":', 1)
    rest = tail.lstrip().lstrip("0123456789.")
    path.write_text(f'{head}"{key}": {huge}{rest}', encoding="utf-8")
    said = refused(capsys, "--problem", path, "--stages", 4, "--micro_batches", 8)
    assert "integer of thousands of digits" in " ".join(said.split())
    path.write_text(f'{head}"{key}": {huge[:4000]}{rest}', encoding="utf-8")
    said = refused(capsys, "--problem", path, "--stages", 4, "--micro_batches", 8)
    assert "huge.json" in said
    assert "0" * 200 not in said


@pytest.mark.filterwarnings("error")
def test_a_problem_without_times_is_planned_and_drawn(problem_file, tmp_path, capsys):
    fields = json.loads(problem_file.read_text(encoding="utf-8"))
    for layer in fields["layers"]:
        layer["forward"] = 0
        for kind in layer["kinds"].values():
            kind["backward"] = 0
    for end in ("head", "tail"):
        fields[end].update(forward=0, backward=0)
    path = tmp_path / "free.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    main(["--problem", str(path), "--explain", "--seconds", "2", "--picture", str(tmp_path / "free.html")])
    said = capsys.readouterr().out
    assert "nan" not in said
    main(["--problem", str(path), "--json", "--seconds", "2", "--picture", str(tmp_path / "free.png")])
    found = json.loads(capsys.readouterr().out)
    assert (found["step_time"], found["lower_bound"], found["gap"]) == (0, 0, 0)


@pytest.mark.parametrize("option", ["--interleave", "--chunks"])
def test_one_option_says_the_number_of_chunks(problem_file, capsys, option):
    main(["--problem", str(problem_file), option, "2", "--json", "--seconds", "2"])
    assert {layer["chunk"] for layer in json.loads(capsys.readouterr().out)["layers"]} == {0, 1}


def test_of_several_numbers_of_chunks_the_fastest_is_taken(problem_file, capsys):
    steps = {}
    for numbers in (["1"], ["2"], ["1", "2"]):
        main(["--problem", str(problem_file), "--interleave", *numbers, "--json", "--seconds", "2"])
        steps[len(numbers), numbers[0]] = json.loads(capsys.readouterr().out)["step_time"]
    assert steps[2, "1"] == pytest.approx(min(steps[1, "1"], steps[1, "2"]), rel=0.02)
    said = refused(capsys, "--problem", problem_file, "--interleave", 1, 2, "--manual", problem_file)
    assert "--manual" in said
