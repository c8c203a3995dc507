"""--simulated: costs of layers found again from stages made of known ones, and what too few runs do not tell."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from kept_programs_here import unpacked

from mindllm.cli.plan import main
from mindllm.compiled.graph.operators import BACKWARD, FORWARD, RECOMPUTED
from mindllm.compiled.simulation.simulation import load_simulation
from mindllm.compiled.simulation.stage_memory import StageMemory
from mindllm.errors import UserError
from mindllm.planning.from_programs.simulated import SimulatedRun, SimulatedStage
from mindllm.planning.from_programs.simulated_costs import simulated_problem
from mindllm.planning.from_programs.stage_shapes import place_of
from mindllm.planning.plan import Plan, evaluate
from mindllm.planning.read_problem import Setting
from mindllm.timing.stage_graph import StageGraph
from mindllm.units import MIB

TRUE = {"forward": 3.0, "backward": 5.0, "again": 2.5, "stays": 100.0, "none": 40.0, "full": 2.0, "full_working": 25.0}
BESIDE = {
    "first": (1.0, 2.0, 50.0, 3.0, 10.0),
    "middle": (0.0, 0.0, 20.0, 4.0, 12.0),
    "last": (6.0, 9.0, 70.0, 30.0, 60.0),
}


def stage(place, kinds, alive, ends=15.0):
    """A stage of layers of these kinds, with the costs above."""
    forward, backward, stays, kept, working = BESIDE[place]
    full, count = kinds.count("full"), len(kinds)
    stays += TRUE["stays"] * count
    kept += sum(TRUE[kind] for kind in kinds)
    if place != "last":
        working += TRUE["full_working"] * (full == count)
    memory = StageMemory(
        stays=round(stays * MIB), shared=0.0, kept=kept * MIB, alive=alive, gaps=8 * MIB,
        passes=round((stays + alive * kept + working) * MIB), ends=round((stays + ends) * MIB),
    )  # fmt: skip
    passes = {
        FORWARD: forward + TRUE["forward"] * count,
        BACKWARD: backward + TRUE["backward"] * count,
        RECOMPUTED: TRUE["again"] * full,
    }
    graph = StageGraph((), "layers", 8, 1, passes, once=11.0, sent=0.5, uncounted=())
    return SimulatedStage(place, tuple(("layer", kind) for kind in kinds), graph, memory)


def run(name, *stages):
    count = len(stages)
    found = [stage(place_of(number, count), kinds, count - number) for number, kinds in enumerate(stages)]
    return SimulatedRun(name, tuple(found), 8, 2000.0, ())


NONE, ALL_RECOMPUTED = ["none"], ["full"]
EVEN, SHIFTED = run("even", 2 * ALL_RECOMPUTED, 2 * ALL_RECOMPUTED), run("shifted", 3 * NONE, NONE)


def test_known_costs_are_found_again():
    problem, fit = simulated_problem([EVEN, SHIFTED], Setting())
    (layer,) = problem.layers
    assert (layer.count, layer.forward, layer.parameter_mb) == (4, pytest.approx(3.0), pytest.approx(100.0))
    assert layer.kinds["none"].backward == pytest.approx(5.0)
    assert layer.kinds["full"].backward == pytest.approx(7.5)
    assert layer.kinds["none"].activation_mb == pytest.approx(40.0)
    assert layer.kinds["full"].activation_mb == pytest.approx(2.0)
    assert layer.kinds["full"].transient_mb - layer.kinds["none"].transient_mb == pytest.approx(25.0)
    assert (problem.head.forward, problem.tail.backward) == (pytest.approx(1.0), pytest.approx(9.0))
    assert (problem.head.memory_mb, problem.tail.activation_mb) == (pytest.approx(50.0), pytest.approx(30.0))
    assert fit.margin_mb == pytest.approx(0.0, abs=1e-6)
    assert problem.per_stage("limit_mb") == (1992.0, 1992.0)  # without the gaps between blocks
    assert problem.micro_batches == 8


def test_a_plan_that_was_not_simulated_is_foretold():
    problem, _ = simulated_problem([EVEN, SHIFTED], Setting())
    mixed = Plan((("full", "none"), ("none", "none")))
    evaluated = evaluate(problem, mixed)
    first, last = stage("first", ["full", "none"], 2), stage("last", 2 * NONE, 1)
    assert evaluated.peak_mb[0] == pytest.approx(first.memory.passes / MIB, abs=0.1)
    assert evaluated.peak_mb[1] == pytest.approx(last.memory.passes / MIB, abs=0.1)


def test_what_the_costs_do_not_explain_is_a_margin_on_every_stage():
    odd = run("odd", 2 * NONE, 2 * ALL_RECOMPUTED)
    memory = odd.stages[0].memory
    heavier = StageMemory(**{**vars(memory), "passes": memory.passes + 6 * MIB})
    stages = (SimulatedStage(**{**vars(odd.stages[0]), "memory": heavier}), odd.stages[1])
    problem, fit = simulated_problem([EVEN, SHIFTED, SimulatedRun("odd", stages, 8, 2000.0, ())], Setting())
    assert 2.0 < fit.margin_mb <= 6.0
    for peak in fit.peaks:
        assert peak.explained + fit.margin_mb >= peak.simulated - 1e-6
    assert min(problem.per_stage("static_mb")) >= fit.margin_mb


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([EVEN], r"2 simulated stages do not tell .* apart; add a run with offset: \[1, -1\], recompute: \[3, 1\]"),
        ([run("n", 2 * NONE, 2 * NONE)], r"add a run with offset: \[1, -1\], nothing recomputed"),
        ([EVEN, run("c", ALL_RECOMPUTED, ["full", "none", "none"])],
        r"layer \(none\) apart; add a run with offset: \[0, 0\], noth"),
    ],
)  # fmt: skip
def test_too_few_runs_are_refused_with_the_one_that_helps(runs, said):
    with pytest.raises(UserError, match=said) as raised:
        simulated_problem(runs, Setting())
    assert "\n" not in str(raised.value)


def test_the_run_that_is_asked_for_is_enough():
    simulated_problem([EVEN, run("asked for", 3 * ALL_RECOMPUTED, ALL_RECOMPUTED)], Setting())


def test_stages_between_the_ends_must_have_been_simulated():
    with pytest.raises(
        UserError, match=r"no simulated run has a stage between the first and the last; add one of three"
    ):
        simulated_problem([EVEN, SHIFTED], Setting(stages=4))
    three = run("three", 2 * ALL_RECOMPUTED, 2 * ALL_RECOMPUTED, 2 * ALL_RECOMPUTED)
    problem, _ = simulated_problem([EVEN, SHIFTED, three], Setting(stages=4), layers=16)
    assert (problem.stages, problem.layer_count) == (4, 16)
    middle = 20 + 12 + 25 + 4 * 3  # stays, working, and what three micro-batches keep beside layers
    assert problem.per_stage("static_mb")[1] + 25 == pytest.approx(middle, abs=0.1)


def test_what_is_no_directory_of_a_program(tmp_path):
    with pytest.raises(UserError, match="directory not found; pass one that mindllm offline"):
        main(["--simulated", str(tmp_path / "none")])
    with pytest.raises(UserError, match=r"contains no simulated rank \(rank_N/simulation\.json\.gz\)"):
        main(["--simulated", str(tmp_path)])
    with pytest.raises(UserError, match="--layers: belongs to --simulated DIR"):
        main(["--problem", "p.json", "--layers", "4"])
    with pytest.raises(UserError, match=r"--yaml FILE writes the keys for the program's own YAML"):
        main(["--simulated", str(tmp_path), "--apply", "run.yaml", "--output", str(tmp_path / "o.yaml")])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept")
    return [str(unpacked(name, directory)) for name in ("mlp_a", "mlp_b")]


def test_a_program_of_somebody_is_planned_from_what_was_kept_of_it(kept, tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    main(
        ["--simulated", *kept, "--layers", "6", "--max_memory", "70MB", "--seconds", "1", "--json", "--yaml", str(plan)]
    )
    found = json.loads(capsys.readouterr().out)
    assert [peak["simulated"] for peak in found["simulated"]] == pytest.approx([81, 21, 47, 35.5], abs=0.6)
    assert all(peak["explained"] + found["margin_mb"] >= peak["simulated"] - 1e-6 for peak in found["simulated"])
    assert max(found["peak_memory_mb"]) <= 70 - found["gaps_mb"]
    assert len(found["layers"]) == 6
    assert any(layer["recompute"] == "full" for layer in found["layers"])
    written = yaml.safe_load(plan.read_text())
    assert written["model"]["model_config"]["offset"] == list(found["offset"])
    assert written["recompute_config"]["recompute"] == list(found["recompute"])
    assert written["parallel_config"] == {"pipeline_stage": 2, "micro_batch_num": 4}


def test_one_kept_run_is_too_few(kept):
    with pytest.raises(
        UserError, match=r"mlp_a: 2 simulated stages do not tell .* add a run with offset: \[0, 0\], nothing"
    ):
        main(["--simulated", kept[0]])


def test_the_tables_say_what_was_shared_out(kept, capsys):
    main(["--simulated", *kept, "--max_memory", "70MB", "--seconds", "1"])
    text = capsys.readouterr().out
    for words in ("layer, full", "first stage beside them", "used peak of what was simulated", "margin on every stage"):
        assert words in text


def test_memory_that_was_laid_out_as_a_whole_is_refused(kept, tmp_path):
    shutil.copytree(kept[0], tmp_path / "static")
    path = tmp_path / "static" / "rank_4" / "simulation.json.gz"
    simulation = load_simulation(path)
    planned = replace(simulation.blocks[-1], kind="Somas", node="SomasMemory")
    replace(simulation, blocks=(*simulation.blocks, planned)).save(path)
    with pytest.raises(UserError, match=r"rank_4: its memory was laid out as a whole \(memory_optimize_level O1\)"):
        main(["--simulated", str(tmp_path / "static"), kept[1]])


def test_a_stage_that_was_not_kept_is_named(kept, tmp_path):
    shutil.copytree(Path(kept[0]) / "rank_4", tmp_path / "rank_4")
    with pytest.raises(UserError, match=r"no rank of stage 0; run mindllm offline with --ranks stages"):
        main(["--simulated", str(tmp_path)])
