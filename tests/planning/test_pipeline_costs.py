"""The planner's costs of a run: memory from small runs, time on a described device, plans held to a dry run."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from dry_run_cases import AHEAD, LOSS, TABLES, WINDOWED, WORKING, FormulaSimulations, pipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from rich.console import Console
from small_cluster import cluster_run

from mindllm.architecture.layer_kind import LayerKind
from mindllm.compiled.graph.compiled_graph import CompiledGraph, Function, Node, Parameter, TensorType
from mindllm.config import load_config, override_config
from mindllm.dry_run.forecast import forecast_stages
from mindllm.errors import CheckFailed, UserError
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.stages import stages_of
from mindllm.planning import validate as validation
from mindllm.planning.costs import configured as costs
from mindllm.planning.costs.layer_kinds import chains, offered_kinds, recomputed
from mindllm.planning.costs.time_costs import LayerTimes, TimeCosts
from mindllm.planning.outcome import fastest, interleaves_table, try_interleaves
from mindllm.planning.plan import Plan, evaluate
from mindllm.planning.recomputation.feasible import lightest_split
from mindllm.planning.reports.costs import costs_parts, validated_parts
from mindllm.planning.solve import Infeasible
from mindllm.timing.costs.exchanges import Group, exchange_seconds
from mindllm.timing.costs.of_graph import operator_time
from mindllm.timing.costs.operators import operator_seconds
from mindllm.timing.costs.work import product
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import MIB

DEVICE = read_device(DEFAULT)
PARAMETER, ACTIVATION = 100, {"none": 50, "select": 30, "full": 10}  # MB in the formula of the simulations
TIMES = LayerTimes(forward=2.0, backward=4.0, again={"none": 0.0, "select": 0.2, "full": 2.0}, step=0.5)


def told_times(config, layers, kinds, device):
    """The times of a layer, longer for each type of them."""
    layers = {name: replace(TIMES, forward=2.0 + number) for number, name in enumerate(layers)}
    return TimeCosts(layers, head=(0.1, 0.2), tail=(1.0, 2.0), point_to_point=0.01, step_of_end=1.0)


@pytest.fixture(autouse=True)
def _told_times(monkeypatch):
    monkeypatch.setattr(costs, "time_costs", told_times)


def described(memory="58GB", **run):
    stages, layers = run.setdefault("stages", 4), run.setdefault("layers", 32)
    run["model"] = {"offset": [layers % stages] + [0] * (stages - 1)}
    config = override_config(pipeline(**run), {"context.max_device_memory": memory})
    return costs.configured_problem(config, DEVICE, FormulaSimulations())


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_small_runs_tell_what_layers_and_kinds_need(stages):
    found = described(stages=stages)
    layer = found.memory.layers["layer"]
    assert layer.parameter == pytest.approx(PARAMETER)
    for kind, size in ACTIVATION.items():
        assert layer.activation[kind] == pytest.approx(size)
        assert layer.transient[kind] == pytest.approx(WORKING[kind] - WORKING["none"], abs=1e-6)
    assert layer.start == pytest.approx(10)  # of gradients that are updated
    loss = found.memory.tail + found.memory.fixed["last"]
    assert loss - found.memory.fixed[found.memory.residuals[0][0].place] == pytest.approx(
        LOSS - WORKING["none"], abs=0.01
    )
    assert max(abs(left) for _, left in found.memory.residuals) < 1e-6


ALTERNATING = {
    "model_type": "gemma2",
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "layernorm_zero_centered_gamma": True,
    "hidden_act": "gelu_tanh",
    "scale_embeddings": True,
    "sandwich_norm": True,
}


def of_two_types(stages=4, layers=12, **sections):
    config = pipeline(stages=stages, layers=layers, model=ALTERNATING, **sections)
    return costs.configured_problem(config, DEVICE, FormulaSimulations())


@pytest.mark.parametrize("stages", [2, 4])
def test_layers_of_two_types_cost_what_each_type_costs_and_stand_in_order(stages):
    found = of_two_types(stages)
    runs = [(layer.name, layer.count, layer.forward) for layer in found.problem.layers]
    assert runs[:3] == [("window 1", 2, 2.0), ("global 1", 1, 3.0), ("window 2", 2, 2.0)]
    assert [name for name, *_ in runs[-2:]] == ["window 4", "global 4"]
    for name, share in (("window", WINDOWED), ("global", 1)):
        layer = found.memory.layers[name]
        assert layer.parameter == pytest.approx(PARAMETER)
        assert layer.start == pytest.approx(10)
        for kind, size in ACTIVATION.items():
            assert layer.activation[kind] == pytest.approx(size * share)
            assert layer.transient[kind] == pytest.approx(WORKING[kind] - WORKING["none"], abs=1e-6)
    assert found.memory.fixed["last"] - WORKING["none"] >= TABLES
    assert found.problem.exposed_communication == 12 / stages * 0.5 + 1.0
    console = Console(record=True, width=200)
    console.print(*costs_parts(found))
    assert "0.098 GB (window), 0.098 GB (global)" in console.export_text()


@pytest.mark.parametrize(
    "plan",
    [
        (("full", "full", "select"), ("none",) * 3, ("full", "select", "none", "none"), ("none",) * 2),
        (("full",) * 3, ("full",) * 3, ("select",) * 4, ("full", "none")),
    ],
)
def test_predicted_memory_of_layers_of_two_types_is_that_of_the_dry_run(plan):
    found = of_two_types()
    config = validation.planned_config(found.config, found.problem, Plan(plan))
    memories = forecast_stages(config, stages_of(config), FormulaSimulations())
    predicted = evaluate(found.problem, Plan(plan)).peak_mb
    assert predicted[:-1] == pytest.approx([memory.used_peak / MIB for memory in memories[:-1]], abs=0.1)
    assert predicted[-1] >= memories[-1].used_peak / MIB - 0.1


def test_layers_of_two_types_are_planned_within_their_memory_and_order():
    found = of_two_types(context={"max_device_memory": "1GB"})
    solution = validation.validate(found, 5, FormulaSimulations()).chosen.solution
    assert solution.best.fits
    assert sum(solution.best.plan.counts) == 12
    written = validation.planned_config(found.config, solution.best.problem, solution.best.plan)
    assert written.model.config.architecture.layers == found.config.model.config.architecture.layers


def test_dense_layers_before_experts_are_types_of_their_own():
    experts = {"model_type": "qwen3_moe", "qk_layernorm": True, "expert_num": 4, "num_experts_chosen": 2}
    config = pipeline(stages=2, layers=8, model={**experts, "moe_layer_freq": [0, 0, 0, 1, 1, 1, 1, 1]})
    found = costs.configured_problem(config, DEVICE, FormulaSimulations())
    assert [(layer.name, layer.count) for layer in found.problem.layers] == [("global", 3), ("global experts", 5)]
    plan = Plan((("full", "none", "none", "none"), ("none",) * 4))
    written = validation.planned_config(found.config, found.problem, plan)
    assert written.model.config.architecture.layers == config.model.config.architecture.layers


PREDICTION = "global experts prediction"


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("last", [("none", "none", "none"), ("full", "full", "none"), ("full", "full", "full")])
def test_a_layer_that_predicts_ahead_is_planned_on_the_last_stage(stages, last):
    model = {**AHEAD, "num_layers": 3 * stages - 1, "first_k_dense_replace": 1}
    config = cluster_run(pp=stages, micro=2 * stages, model=model)
    found = costs.configured_problem(config, DEVICE, FormulaSimulations())
    assert [(layer.name, layer.count) for layer in found.problem.layers][-1] == (PREDICTION, 1)
    console = Console(record=True, width=200)
    console.print(*costs_parts(found))
    assert f"{PREDICTION}: memory beyond those of full" in console.export_text()
    assert f"GB ({PREDICTION})" not in console.export_text()
    plan = Plan((*((("none",) * 3,) * (stages - 1)), last))
    written = validation.planned_config(found.config, found.problem, plan)
    memories = forecast_stages(written, stages_of(written), FormulaSimulations())
    assert memories[-1].stage.runs[-1].kind.spec.is_mtp
    assert evaluate(found.problem, plan).peak_mb[-1] == pytest.approx(memories[-1].used_peak / MIB, abs=TABLES + 0.1)


def test_the_run_as_it_is_is_judged_too():
    config = pipeline(stages=2, layers=8, recompute_config={"recompute": [2, 0], "select_recompute": [3, 0]})
    found = costs.configured_problem(config, DEVICE, FormulaSimulations())
    before = found.as_it_is()
    assert before.plan == Plan((("full", "full", "select", "none"), ("none",) * 4))
    assert before.problem is found.problem


def test_a_problem_has_the_times_of_the_run_and_leaves_room_for_gaps():
    found = described(memory="10GB", stages=4, layers=32)
    problem = found.problem
    assert (problem.stages, problem.micro_batches, problem.layer_count) == (4, 16, 32)
    assert problem.layers[0].kinds["full"].backward == 6.0
    assert problem.exposed_communication == 32 / 4 * 0.5 + 1.0
    assert problem.per_stage("limit_mb")[0] < found.limit_mb == 10 * 1024
    console = Console(record=True, width=200)
    console.print(*costs_parts(found))
    text = console.export_text()
    assert "small runs" in text
    assert "Atlas 800T A2" in text


@some.composite
def _plans(draw):
    """A plan of four stages, each from the most recomputed layer to the least."""
    places = []
    for _ in range(4):
        counts = [draw(some.integers(0, 6)) for _ in ACTIVATION]
        counts[-1] += not sum(counts)
        names = ("full", "select", "none")
        places.append(tuple(name for name, count in zip(names, counts, strict=True) for _ in range(count)))
    return Plan(tuple(places))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_plans())
def test_predicted_memory_is_that_of_the_dry_run_and_plans_read_back(tmp_path_factory, plan):
    found = described(layers=sum(plan.counts))
    config = validation.planned_config(found.config, found.problem, plan)
    memories = forecast_stages(config, stages_of(config), FormulaSimulations())
    for memory, predicted in zip(memories, evaluate(found.problem, plan).peak_mb, strict=True):
        assert predicted == pytest.approx(memory.used_peak / MIB, abs=0.1)  # a step has more micro-batches
    path = tmp_path_factory.mktemp("run") / "planned.yaml"
    validation.write_run(path, config)
    written = [(layer.stage, layer.recompute, layer.patterns) for layer in make_plan(load_config(path)).layers]
    wanted = [
        (stage, kind.recompute, dict(kind.patterns))
        for stage, names in enumerate(plan.places)
        for kind in (recomputed(LayerKind(), found.problem.yaml_kinds[name]) for name in names)
    ]
    assert written == wanted


@dataclass(frozen=True)
class Peaks:
    """Memory of a stage as a dry run that needs ``more`` than the formula finds it."""

    inner: object
    more: int

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def used_peak(self):
        return self.inner.used_peak + self.more * MIB

    def with_workspace(self, elements):
        return self.inner.with_workspace(elements) + self.more * MIB


def contradicted(monkeypatch, more):
    """Makes the dry run find ``more(stage)`` MB beyond the formula."""

    def forecast(config, stages, simulations):
        return [Peaks(memory, more(memory.stage)) for memory in forecast_stages(config, stages, simulations)]

    monkeypatch.setattr(validation, "forecast_stages", forecast)


def test_what_the_dry_run_confirms_is_planned_once():
    found = described(memory="2.2GB")
    validated = validation.validate(found, 5, FormulaSimulations())
    assert [done.confirmed for done in validated.rounds] == [True]
    assert validated.chosen.fits


def test_a_stage_that_needs_more_than_predicted_gets_a_cut(monkeypatch):
    contradicted(monkeypatch, lambda stage: 400 if stage.number == 1 else 0)
    validated = validation.validate(described(memory="2.2GB"), 5, FormulaSimulations())
    first, last = validated.rounds[0], validated.rounds[-1]
    assert not first.fits
    assert validated.chosen is last
    assert last.confirmed
    assert last.memories[1].used_peak <= 2.2 * 1024 * MIB
    assert last.differences[1] == pytest.approx(0, abs=20)
    console = Console(record=True, width=200)
    console.print(*validated_parts(validated))
    assert "round 1" in console.export_text()


def test_a_stage_that_needs_less_than_predicted_is_used(monkeypatch):
    plain = validation.validate(described(memory="2GB"), 5, FormulaSimulations())
    contradicted(monkeypatch, lambda stage: -300 if stage.number == 0 else 0)
    roomier = validation.validate(described(memory="2GB"), 5, FormulaSimulations())
    assert roomier.chosen.fits
    assert roomier.chosen.solution.best.step_time <= plain.chosen.solution.best.step_time


def test_memory_that_never_suffices_ends_after_a_few_rounds(monkeypatch):
    contradicted(monkeypatch, lambda stage: 10_000)
    with pytest.raises((CheckFailed, Infeasible)):
        validation.validate(described(memory="2.2GB"), 5, FormulaSimulations())


def test_the_fastest_number_of_chunks_is_taken():
    found = described(stages=4, layers=32)
    tried = try_interleaves(found, [1, 2], 2)
    steps = [choice.solution.best.step_time for choice in tried]
    assert steps[1] < steps[0]
    assert fastest(tried).chunks == 2
    console = Console(record=True, width=200)
    console.print(interleaves_table(tried))
    assert "pp_interleave_num" in console.export_text()
    plan = tried[1].solution.best.plan
    written = validation.planned_config(found.config, tried[1].configured.problem, plan)
    assert written.model.config.pp_interleave_num == 2
    assert written.parallel.pipeline_config.pipeline_interleave
    assert len(make_plan(written).layers) == 32


def test_chunks_that_do_not_fit_are_left_out():
    found = described(stages=4, layers=32)
    least = [lightest_split(found.interleaved(chunks).problem.with_limit(0)).missing_mb for chunks in (1, 4)]
    tight = try_interleaves(replace(found, problem=found.problem.with_limit(sum(least) / 2)), [1, 4], 1)
    assert [choice.solution is None for choice in tight] == [False, True]
    assert fastest(tight).chunks == 1
    with pytest.raises(Infeasible):
        try_interleaves(described(memory="0.5GB"), [1, 2], 1)
    with pytest.raises(UserError, match="32 layers cannot fill"):
        try_interleaves(found, [9], 1)


@pytest.mark.parametrize("size", ["3GB", "3072MB", "3145728KB"])
def test_memory_is_given_in_any_unit(size):
    assert costs.with_memory(pipeline(stages=2, layers=8), size).context.max_device_memory == "3GB"


def test_a_limit_that_is_too_small_says_what_would_fit():
    with pytest.raises(Infeasible, match=r"with limits .* higher .* one fits"):
        validation.validate(described(memory="0.5GB"), 5, FormulaSimulations())


@pytest.mark.parametrize(
    ("recompute", "tp", "names"),
    [
        ({}, 1, ["none", "select", "full"]),
        ({}, 2, ["none", "select", "comm", "both", "full"]),
        ({"select_comm_recompute": True}, 1, ["none", "select", "comm", "both", "full"]),
        ({"select_recompute": {r"feed_forward\.mul": [2, 1], r"attention\.mul": [1, 1]}}, 1,
         ["none", "select", "select 2", "full"]),
    ],
)  # fmt: skip
def test_kinds_are_those_a_run_can_choose_between(recompute, tp, names):
    kinds = offered_kinds(pipeline(stages=2, layers=8, tp=tp, recompute_config=recompute))
    assert list(kinds) == names
    rows = chains(kinds)
    assert sorted(name for row in rows for name in row) == sorted(kinds)
    assert all(kinds[one].holds(kinds[other]) for row in rows for one, other in pairwise(row))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": 1, "micro": 1}, r"pipeline_stage.*there is no pipeline to plan"),
        ({"context": {"device_target": "CPU"}}, r"device_target.*only Ascend"),
        ({"recompute_config": {"recompute": True, "select_recompute_exclude": [r"attention\.mul"]}}, "excluded operators"),
        ({"parallel": {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "gpipe"}}}, "add --formula"),
    ],
)  # fmt: skip
def test_runs_that_are_not_planned_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        described(**changes)


DIMENSIONS = {"a": (64, 128), "b": (128, 256), "c": (64, 256)}


def graph_of(op, inputs, ranks=(), shape=(64, 256)):
    """A graph of one operator on half-precision tensors."""
    parameters = {name: Parameter(name, name, DIMENSIONS[name], "float16") for name in inputs}
    node = Node(op, "out", tuple(inputs), TensorType(shape, "float16"), "", {"group_rank_ids": ranks})
    return CompiledGraph(0, (Function("step", (node,), (), "out"),), parameters, {}), node


def test_an_operator_of_a_graph_takes_what_the_model_of_time_says():
    """One product, as the planner reads it from a compiled graph and as the step's model writes it down."""
    described = product("", 64, 128, 256, "float16")
    assert operator_time(*graph_of("MatMul", "ab"), DEVICE) == pytest.approx(1e3 * operator_seconds(described, DEVICE))


@pytest.mark.parametrize(
    ("op", "ranks", "group"),
    [("AllGather", (0, 1, 2, 3), Group(4)), ("AllReduce", (0, 8), Group(2, 8)), ("Send", (0, 8), Group(2, 8))],
)
def test_an_exchange_of_a_graph_takes_what_the_model_of_time_says(op, ranks, group):
    spent = operator_time(*graph_of(op, "c", ranks), DEVICE)
    assert spent == pytest.approx(1e3 * exchange_seconds(op, 2 * 64 * 256, group, DEVICE))


def test_a_correction_leaves_the_gaps_that_were_seen():
    found = described(memory="2.2GB")
    once = validation.validate(found, 5, FormulaSimulations()).chosen
    gappy = replace(once, memories=[Peaks(memory, 0) for memory in once.memories])
    problem = validation.corrected(found.problem, gappy, first=True)
    assert all(limit < found.limit_mb for limit in problem.per_stage("limit_mb"))


@pytest.mark.parametrize("moment", ["start_mb", "update_mb"])
def test_a_correction_moves_the_start_and_the_end_of_a_step_too(moment):
    found = described(memory="2.2GB")
    idle = found.problem.model_copy(update={moment: 5000.0, "limit_mb": 9000.0})
    once = replace(
        validation.validate(replace(found, problem=idle), 5, FormulaSimulations()).rounds[0], limit_mb=9000.0
    )
    corrected = evaluate(validation.corrected(idle, once, first=True), once.solution.best.plan)
    assert corrected.peak_mb.tolist() == pytest.approx(once.used_mb)
