"""Plans validated by a dry run: corrected where it contradicts the prediction, written, and read back."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from dry_run_cases import pipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from rich.console import Console

from mindllm.config import load_config, override_config
from mindllm.dry_run.simulations import Simulations
from mindllm.errors import CheckFailed, UserError
from mindllm.parallel.layer_plan import DEFAULT_PATTERNS, make_plan
from mindllm.parallel.stages import Stage
from mindllm.planning import subject
from mindllm.planning import validate as validation
from mindllm.planning.costs.formula import formula_problems
from mindllm.planning.outcome import fastest, interleaves_table, try_problems
from mindllm.planning.plan import Plan, evaluate
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.reports.plan import validated_parts
from mindllm.planning.solve import Infeasible
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.units import MIB

SOURCE = Path(__file__).parents[2] / "configs/llama2/pretrain_llama2_13b_16p.yaml"
DEVICE = read_device(DEFAULT)
LIMIT = 45 * 1024  # MB


@dataclass(frozen=True)
class SimulatedStage:
    """Memory of a stage in a dry run."""

    stage: Stage
    used_peak: int
    gaps: int = 0
    method: str = "test"

    @property
    def actual_peak(self):
        return self.used_peak + self.gaps

    def with_workspace(self, elements):
        return self.used_peak + self.gaps


@pytest.fixture
def dry_run(monkeypatch):
    """Makes the dry run return the memory of the formula, and ``more(stage)`` MB."""

    def put(more):
        def forecast(config, stages, simulations):
            sizes = stage_bytes(workload_of(config))
            return [SimulatedStage(stage, int(sizes[stage.number]) + more(stage.number) * MIB) for stage in stages]

        monkeypatch.setattr(validation, "forecast_stages", forecast)

    return put


def problem_of(config, chunks=None):
    return formula_problems(config, DEVICE, chunks)[0]


def run():
    return load_config(SOURCE, ["--context.max_device_memory=45GB"])


def validated(problem=None, limit=LIMIT):
    config = run()
    return validation.validate(config, problem or problem_of(config), limit, 5, Simulations())


def test_a_confirmed_plan_is_planned_once(dry_run):
    dry_run(lambda stage: 0)
    found = validated()
    assert [done.confirmed for done in found.rounds] == [True]
    assert found.chosen.fits


def test_a_stage_that_needs_more_than_predicted_is_cut(dry_run):
    dry_run(lambda stage: 4000 if stage == 1 else 0)
    found = validated()
    first, last = found.rounds[0], found.rounds[-1]
    assert not first.fits
    assert found.chosen is last
    assert last.confirmed
    assert last.memories[1].actual_peak <= LIMIT * MIB
    assert last.differences[1] == pytest.approx(0, abs=20)
    console = Console(record=True, width=200)
    console.print(*validated_parts(found))
    assert "round 1" in console.export_text()


def test_a_stage_that_needs_less_than_predicted_is_filled(dry_run):
    dry_run(lambda stage: 0)
    plain = validated()
    dry_run(lambda stage: -3000 if stage == 0 else 0)
    filled = validated()
    assert filled.chosen.fits
    assert filled.chosen.solution.best.step_time <= plain.chosen.solution.best.step_time


def test_memory_that_never_suffices_ends_after_a_few_rounds(dry_run):
    dry_run(lambda stage: 50_000)
    with pytest.raises((CheckFailed, Infeasible)):
        validated()


def test_a_correction_leaves_the_gaps_of_the_dry_run_free(dry_run):
    dry_run(lambda stage: 0)
    once = validated().chosen
    gappy = replace(once, memories=[replace(memory, gaps=6000 * MIB) for memory in once.memories])
    problem = validation.corrected(once.solution.best.problem, gappy, first=True)
    assert problem.per_stage("limit_mb") == pytest.approx((LIMIT - 6000,) * 4)


@pytest.mark.parametrize("moment", ["start_mb", "update_mb"])
def test_a_correction_moves_the_start_and_the_end_of_a_step_too(moment, dry_run):
    dry_run(lambda stage: 0)
    idle = problem_of(run()).model_copy(update={moment: 50_000.0, "limit_mb": 90_000.0})
    once = validated(idle, 90_000.0).rounds[0]
    corrected = evaluate(validation.corrected(idle, once, first=True), once.solution.best.plan)
    assert corrected.peak_mb.tolist() == pytest.approx(once.used_mb)


def test_a_limit_that_is_too_small_says_what_would_fit():
    config = load_config(SOURCE, ["--context.max_device_memory=10GB"])
    with pytest.raises(Infeasible, match=r"with limits .* higher .* one fits"):
        validated(problem_of(config))


KINDS = ("full", "select", "none")


@some.composite
def _plans(draw):
    """A plan of four stages, each from the most recomputed layer to the least."""
    places = []
    for _ in range(4):
        counts = [draw(some.integers(0, 6)) for _ in KINDS]
        counts[-1] += not sum(counts)
        places.append(tuple(name for name, count in zip(KINDS, counts, strict=True) for _ in range(count)))
    return Plan(tuple(places))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_plans())
def test_a_written_plan_reads_back(tmp_path_factory, plan):
    layers = sum(plan.counts)
    config = pipeline(stages=4, layers=layers, model={"offset": [layers % 4, 0, 0, 0]})
    path = tmp_path_factory.mktemp("run") / "planned.yaml"
    validation.write_run(path, validation.planned_config(config, problem_of(config), plan))
    selected = {"select_recompute": tuple(sorted(DEFAULT_PATTERNS["select_recompute"]))}
    layers = make_plan(load_config(path)).layers
    written = [
        (layer.stage, layer.recompute, {key: tuple(sorted(p)) for key, p in layer.patterns.items() if p})
        for layer in layers
    ]
    assert written == [
        (stage, name == "full", selected if name == "select" else {})
        for stage, names in enumerate(plan.places)
        for name in names
    ]


def test_the_fastest_number_of_chunks_is_taken():
    config = load_config(SOURCE)
    tried = try_problems(formula_problems(config, DEVICE, [1, 2]), 5)
    assert fastest(tried).chunks == 2
    console = Console(record=True, width=200)
    console.print(interleaves_table(tried))
    assert "pp_interleave_num" in console.export_text()
    written = validation.planned_config(config, tried[1].problem, tried[1].solution.best.plan)
    assert written.model.config.pp_interleave_num == 2
    assert written.parallel.pipeline_config.pipeline_interleave
    assert len(make_plan(written).layers) == 40


def test_chunks_that_do_not_fit_are_left_out():
    problems = formula_problems(load_config(SOURCE), DEVICE, [1, 4])
    least = [lightest_split(problem.with_limit(0)).missing_mb for problem in problems]
    tight = try_problems([problem.with_limit(sum(least) / 2) for problem in problems], 1)
    assert [choice.solution is None for choice in tight] == [False, True]
    assert fastest(tight).chunks == 1
    with pytest.raises(Infeasible):
        try_problems([problem.with_limit(1.0) for problem in problems], 1)
    with pytest.raises(UserError, match="layers cannot fill"):
        formula_problems(load_config(SOURCE), DEVICE, [11])


def test_layers_of_two_types_keep_their_order():
    windows = {"model_type": "gemma2", "sliding_window": 8, "sliding_window_pattern": 3, "hidden_act": "gelu_tanh"}
    windows |= {"layernorm_zero_centered_gamma": True, "scale_embeddings": True, "sandwich_norm": True}
    config = override_config(pipeline(stages=4, layers=12, model=windows), {"context.max_device_memory": "58GB"})
    problem = problem_of(config)
    assert [layer.count for layer in problem.layers] == [2, 1] * 4
    plan = Plan((("full", "full", "select"), ("none",) * 3, ("full", "select", "none", "none"), ("none",) * 2))
    written = validation.planned_config(config, problem, plan)
    assert written.model.config.architecture.layers == config.model.config.architecture.layers


@pytest.mark.parametrize("size", ["3GB", "3072MB", "3145728KB"])
def test_memory_is_given_in_any_unit(size):
    assert subject.with_memory(pipeline(stages=2, layers=8), size).context.max_device_memory == "3GB"
