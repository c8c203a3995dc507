"""Extrapolation: exact where memory is linear, checked, shared by stages that are alike; and the advice it gives."""

import shlex
from types import SimpleNamespace

import pytest
from dry_run_cases import BACKWARD, CONSTANTS, GRADIENT, KEPT, STEP, WEIGHT, FormulaSimulations, pipeline, profile
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cluster import cluster_run

from mindllm.compiled.simulation.simulation import ACTIVATIONS, CATEGORIES, OTHER, Block, Simulation
from mindllm.config import override_config
from mindllm.dry_run.advice import shortage
from mindllm.dry_run.extrapolate import design_for, whole_stage
from mindllm.dry_run.forecast import forecast_stages, simulate_stages
from mindllm.dry_run.moments import Use, bytes_of, fullest, moments_of
from mindllm.dry_run.profile import load_profile, profile_of, save_profile, thinned
from mindllm.parallel.stages import MIDDLE, stages_of
from mindllm.reduced_runs.stage import Point, point_of, reduce_to_stage
from mindllm.timing.configured import workload_of
from mindllm.timing.memory import stage_bytes
from mindllm.units import MIB, gigabytes

TOKENS = Use(OTHER, "inputs0", "", False)
RESULT = Use(ACTIVATIONS, "cross_entropy", "Exp", False)
AFTER = "Default/cross_entropy-CrossEntropy/Mul"
COUNTS = st.integers(0, 10**9)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(1, 16),
    st.integers(1, 64),
    st.lists(COUNTS, min_size=9, max_size=9),
)
def test_what_is_linear_is_extrapolated_exactly(layers, alive, micro_batches, terms):
    target = Point(tuple(layers), alive, max(alive, micro_batches))
    design = design_for([target], shorter=alive > 1) or whole_stage(target)

    def moments(point):
        of_layers = sum(count * terms[run] for run, count in enumerate(point.layers))
        kept = point.alive * sum(count * terms[run + 3] for run, count in enumerate(point.layers))
        step = {WEIGHT: of_layers + terms[6], CONSTANTS: point.micro_batches * terms[8]}
        return {STEP: step, "backward": {**step, KEPT: kept + terms[7]}}

    found = design.predict(target, {point: moments(point) for point in design.points})
    assert {kind: bytes_of(fill) for kind, fill in found.items()} == {
        kind: bytes_of(fill) for kind, fill in moments(target).items()
    }
    assert all(point.alive <= max(alive, 2) and point.micro_batches >= point.alive for point in design.points)


@pytest.mark.parametrize("chance", [33792, -33792])
def test_a_result_that_one_more_micro_batch_meets_by_chance_is_not_multiplied(chance):
    """At one of many moments. Of a hundred micro-batches more it would be megabytes."""
    target = Point((4, 4), 2, 256)
    design = whole_stage(target)
    _, more = design.passing

    def moments(point):
        same = {WEIGHT: sum(point.layers), CONSTANTS: 512 * point.micro_batches, RESULT: 10**6}
        met = {**same, RESULT: 10**6 + chance * (point == more)}
        return {STEP: same, "backward": same, "lookup": met}

    found = design.predict(target, {point: moments(point) for point in design.points})
    assert set(map(bytes_of, found.values())) == {8 + 512 * 256 + 10**6}


def found_by(config):
    """The methods by which the stages of a run are found, and for how many simulations; all peaks are right."""
    simulations = FormulaSimulations()
    forecast = forecast_stages(config, stages_of(config), simulations)
    assert [memory.peak for memory in forecast] == [profile(config, stage.rank).peak for stage in stages_of(config)]
    return [memory.method for memory in forecast], len(
        {(str(r.config.model_dump()), r.rank) for r in simulations.asked}
    )


def test_a_stage_is_simulated_as_it_is_where_small_runs_would_take_longer():
    assert found_by(pipeline(2, 14, 5)) == (["simulated"] * 2, 2)
    fewer = "extrapolated: fewer micro-batches"
    assert found_by(pipeline(2, 14, 64)) == ([fewer] * 2, 6)  # each whole, and two small ones for a micro-batch more
    assert found_by(pipeline(2, 48, 64)) == (["extrapolated: 4 smaller runs"] * 2, 8)


def test_middle_stages_of_a_long_pipeline_share_small_runs():
    """The first stage of few layers is simulated as it is; the 14 in the middle are found from short pipelines."""
    methods, count = found_by(pipeline(16, 48, 32, dp=8, recompute_config={"recompute": True}))
    assert methods == ["simulated", *["extrapolated: 4 smaller runs"] * 14, "extrapolated: fewer micro-batches"]
    assert count == 1 + 4 + 3


def test_a_long_pipeline_is_forecast_from_short_ones():
    config = pipeline(8, 160, 64, dp=8, recompute_config={"recompute": True})
    simulations = FormulaSimulations()
    forecast = forecast_stages(config, stages_of(config), simulations)
    assert [memory.peak for memory in forecast] == [profile(config, stage.rank).peak for stage in stages_of(config)]
    assert max(request.config.parallel_config.pipeline_stage for request in simulations.asked) <= 6
    assert max(request.config.model.config.num_layers for request in simulations.asked) <= 9
    assert len(simulations.asked) <= 16
    assert not any(memory.exact for memory in forecast)


@pytest.mark.parametrize(("dp", "stages"), [(1, 8), (2, 8), (4, 8), (16, 8), (2, 16), (8, 6)])
def test_small_pipelines_are_ones_that_mindspore_accepts(dp, stages):
    config = pipeline(stages, 5 * stages, 4 * stages, dp=dp, recompute_config={"recompute": True})
    simulations = FormulaSimulations()
    forecast = forecast_stages(config, stages_of(config), simulations)
    assert [memory.peak for memory in forecast] == [profile(config, stage.rank).peak for stage in stages_of(config)]
    for request in simulations.asked:
        sizes = request.config.parallel_config
        assert sizes.device_num in (1, 2, 4) or sizes.device_num % 8 == 0
        assert sizes.micro_batch_num >= sizes.pipeline_stage


def test_mixed_recomputation_is_forecast():
    recompute = {"recompute": [4, 3, 0, 0], "select_recompute": [8, 5, 8, 0]}
    config = pipeline(4, 32, 16, recompute_config=recompute)
    stages = stages_of(config)
    assert [stage.recompute for stage in stages] == [
        "4 full, 4 select", "3 full, 2 select, 3 none", "8 select", "8 none"
    ]  # fmt: skip
    forecast = forecast_stages(config, stages, FormulaSimulations())
    assert [memory.used_peak for memory in forecast] == [profile(config, stage.rank).used_peak for stage in stages]


FEWER_AND_FEWER = {"recompute": [5, 4, 3, 2, 1, 0, 0, 0]}


def test_of_two_kinds_of_layers_one_of_each_is_a_start():
    """The stage's first layer and its last one are apart, so 1 and 2 of each are in line; of one kind it takes 2 and 3."""
    methods, count = found_by(pipeline(8, 80, 64, dp=8, recompute_config=FEWER_AND_FEWER))
    assert (
        count == 3 + 8 + 1 + 3
    )  # stages 5 and 6, of one kind, share those of four stages of two, with a check of their own
    assert methods[1:7] == ["extrapolated: 8 smaller runs"] * 6
    fewest = [design_for([Point((6, 6), 4, 64)], alone=alone).base.layers for alone in (True, False)]
    assert fewest == [(1, 1), (2, 2)]
    assert design_for([Point((12,), 4, 64)], alone=True).base.layers == (2,)


def test_chunks_keep_the_length_of_the_pipeline():
    config = pipeline(
        4, 32, 16,
        model={"pp_interleave_num": 2}, parallel={"pipeline_config": {"pipeline_interleave": True}},
    )  # fmt: skip
    simulations = FormulaSimulations()
    forecast = forecast_stages(config, stages_of(config), simulations)
    assert [memory.stage.number for memory in forecast] == [0, 1, 2, 3]
    for request in simulations.asked:
        assert request.config.parallel_config.pipeline_stage == 4
        assert request.config.parallel_config.micro_batch_num % 4 == 0


def test_chunks_grow_together():
    design = design_for([Point((8, 8), 2, 16)], micro_step=2, shorter=False, together=True)
    assert [point.layers for point in design.points] == [(2, 2), (3, 3), (2, 2), (4, 4)]

    def moments(point):  # alive are 3 micro-batches of one chunk and 2 of the other, or 4 and 1: whichever takes more
        first, second = point.layers
        return {"backward": {KEPT: max(3 * first + 2 * second, 4 * first + second)}}

    found = design.predict(Point((8, 8), 2, 16), {point: moments(point) for point in design.points})
    assert found == {"backward": {KEPT: 40}}
    assert design_for([Point((8, 7), 2, 16)], micro_step=2, shorter=False, together=True) is None


class Bent(FormulaSimulations):
    """Memory that is not linear: a moment holds ``bend(layers, micro-batches)`` MB more."""

    def __init__(self, moment, bend):
        super().__init__()
        self.moment, self.bend = moment, bend

    def profiles(self, requests):
        found = super().profiles(requests)
        for request, one in zip(requests, found, strict=True):
            layers = next(stage.layers for stage in stages_of(request.config) if stage.rank == request.rank)
            one.moments[self.moment][KEPT] = one.moments[self.moment].get(KEPT, 0) + MIB * self.bend(
                layers, request.config.parallel_config.micro_batch_num
            )
            object.__setattr__(one, "used_peak", bytes_of(fullest(one.moments)))
        return found


class OtherwiseAlone(FormulaSimulations):
    """Stages in the middle without a recomputed layer hold what no stage with one tells of."""

    def profiles(self, requests):
        found = super().profiles(requests)
        for request, one in zip(requests, found, strict=True):
            stage = next(stage for stage in stages_of(request.config) if stage.rank == request.rank)
            if stage.place == MIDDLE and len(stage.runs) == 1:
                one.moments[BACKWARD][KEPT] += MIB * stage.layers**2
                object.__setattr__(one, "used_peak", bytes_of(fullest(one.moments)))
        return found


def test_stages_that_are_otherwise_without_a_kind_of_layers_are_simulated_whole():
    config = pipeline(8, 80, 64, dp=8, recompute_config=FEWER_AND_FEWER)
    stages, simulations = stages_of(config)[1:7], OtherwiseAlone()
    forecast, truth = (find(config, stages, simulations) for find in (forecast_stages, simulate_stages))
    methods = [memory.method for memory in forecast]
    assert methods == ["extrapolated: 8 smaller runs"] * 4 + ["extrapolated: fewer micro-batches"] * 2
    assert [memory.used_peak for memory in forecast] == [memory.used_peak for memory in truth]


def forecast_and_truth(bent):
    """Forecasts of both stages, and what simulating them whole gives."""
    config = pipeline(2, 48, 16)  # of fewer layers, whole stages take no longer than small runs
    stages = stages_of(config)
    forecast = forecast_stages(config, stages, bent)
    return forecast, [memory.used_peak for memory in simulate_stages(config, stages, bent)]


def test_where_the_check_disagrees_whole_stages_are_simulated():
    forecast, truth = forecast_and_truth(Bent(BACKWARD, lambda layers, micro: layers**3))
    assert {"extrapolated: fewer micro-batches"} == {memory.method for memory in forecast}
    assert [memory.used_peak for memory in forecast] == truth


def test_where_micro_batches_matter_nothing_is_extrapolated():
    forecast, truth = forecast_and_truth(Bent(BACKWARD, lambda layers, micro: layers**3 + micro**2))
    assert {"simulated"} == {memory.method for memory in forecast}
    assert [memory.used_peak for memory in forecast] == truth


def test_a_moment_that_jumps_far_below_the_peak_does_not_matter():
    forecast, truth = forecast_and_truth(Bent(STEP, lambda layers, micro: 40 * (micro % 2)))
    assert {"extrapolated: 4 smaller runs"} == {memory.method for memory in forecast}
    assert [memory.used_peak for memory in forecast] == truth


class WithMeetings(FormulaSimulations):
    """With five accumulation steps and more two results of the loss meet at a moment that has one of them with fewer.

    ``use``: whose results they are; ``below``: MB by which the moment stays below the peak without the second one.
    """

    def __init__(self, use, below):
        super().__init__()
        self.use, self.below = use, below

    def profiles(self, requests):
        found = super().profiles(requests)
        for request, one in zip(requests, found, strict=True):
            kept = one.moments[BACKWARD][KEPT] - self.below * MIB
            meeting = request.config.runner_config.gradient_accumulation_steps >= 5
            one.moments[AFTER] = {**one.moments[BACKWARD], KEPT: kept, self.use: 30 * MIB * meeting}
            object.__setattr__(one, "used_peak", bytes_of(fullest(one.moments)))
        return found


def accumulated(simulations):
    """The forecast and the truth of a run that accumulates gradients without a pipeline."""
    config = cluster_run(
        dp=2, model={"num_layers": 32}, gradient_aggregation_group=4,
        parallel={"enable_parallel_optimizer": True}, runner_config={"gradient_accumulation_steps": 8},
    )  # fmt: skip
    (memory,), (truth,) = (find(config, stages_of(config), simulations) for find in (forecast_stages, simulate_stages))
    return memory, truth


def test_accumulation_steps_are_forecast_from_few_and_checked_with_one_more():
    simulations = FormulaSimulations()
    memory, truth = accumulated(simulations)
    assert memory.method == "extrapolated: 4 smaller runs"
    assert memory.used_peak == truth.used_peak
    sizes = [request.config for request in simulations.asked[:-1]]
    parts = [(size.model.config.num_layers, size.runner_config.gradient_accumulation_steps) for size in sizes]
    assert parts == [(2, 3), (3, 3), (2, 4), (4, 5)]


def test_results_of_the_loss_that_meet_by_chance_do_not_grow_with_layers():
    """As in MindFormers' Llama 2 7B with accumulation: which logits of two steps are there at once is a matter of order."""
    memory, truth = accumulated(WithMeetings(RESULT, below=40))
    assert memory.method == "extrapolated: 4 smaller runs"
    assert memory.used_peak == truth.used_peak


@pytest.mark.parametrize(("use", "below"), [(GRADIENT, 40), (RESULT, 20)])
def test_what_layers_may_have_part_in_or_comes_near_the_peak_is_not_left_to_small_runs(use, below):
    memory, _ = accumulated(WithMeetings(use, below))
    assert memory.method == "extrapolated: fewer micro-batches"


class WithTokens(FormulaSimulations):
    """The tokens of the step, 2 MB for each micro-batch, are there at the peak of some simulations and not of others."""

    def profiles(self, requests):
        found = super().profiles(requests)
        for request, one in zip(requests, found, strict=True):
            layers = next(stage.layers for stage in stages_of(request.config) if stage.rank == request.rank)
            if layers % 2:
                one.moments[BACKWARD][TOKENS] = 2 * MIB * request.config.parallel_config.micro_batch_num
            object.__setattr__(one, "used_peak", bytes_of(fullest(one.moments)))
        return found


def test_inputs_that_come_and_go_do_not_spoil_an_extrapolation():
    """As in DeepSeek-V3's middle stages, one of whose simulations has the loss mask at its peak later than the others."""
    forecast, truth = forecast_and_truth(WithTokens())
    assert {"extrapolated: 4 smaller runs"} == {memory.method for memory in forecast}
    assert [memory.used_peak - size for memory, size in zip(forecast, truth, strict=True)] == [32 * MIB] * 2
    assert all(memory.peak[TOKENS] == 32 * MIB for memory in forecast)


class WithResult(FormulaSimulations):
    """What an operator yields is gone in some simulations at a moment after the peak, when it is still there in others."""

    def __init__(self, size=32 * MIB):
        super().__init__()
        self.size = size

    def profiles(self, requests):
        found = super().profiles(requests)
        for request, one in zip(requests, found, strict=True):
            layers = next(stage.layers for stage in stages_of(request.config) if stage.rank == request.rank)
            after = {use: size - 64 * MIB if use == KEPT else size for use, size in one.moments[BACKWARD].items()}
            one.moments[AFTER] = {**after, RESULT: self.size} if layers % 2 else after
        return found


def test_a_result_that_is_not_always_there_yet_is_not_multiplied_by_layers():
    """As in InternLM 2's last stage, where one of four simulations still has the exponentials of the logits."""
    forecast, truth = forecast_and_truth(WithResult())
    assert {"extrapolated: 4 smaller runs"} == {memory.method for memory in forecast}
    assert [memory.used_peak for memory in forecast] == truth
    assert all(memory.moments.get(AFTER, {}).get(RESULT, 0) <= 32 * MIB for memory in forecast)


def test_a_scalar_above_the_peak_is_no_reason_to_simulate_whole_stages():
    """As in Llama 2 13B's last stage, whose loss meets the exponentials of the logits in one of four simulations."""
    forecast, truth = forecast_and_truth(WithResult(64 * MIB + 512))
    assert {"extrapolated: 4 smaller runs"} == {memory.method for memory in forecast}
    assert [memory.used_peak for memory in forecast] == pytest.approx(truth, abs=512)


def test_a_reduced_run_has_the_stage_that_is_asked_for():
    config = pipeline(8, 80, 64, recompute_config={"recompute": [5] * 8})
    like = stages_of(config)[3]
    reduced, rank = reduce_to_stage(config, like, Point((2, 1), 3, 5))
    stages = stages_of(reduced)
    stage = next(stage for stage in stages if stage.rank == rank)
    assert stage.likeness == like.likeness
    assert point_of(stage, reduced) == Point((2, 1), 3, 5)
    assert reduced.model.config.hidden_size == config.model.config.hidden_size
    assert sum(stage.layers for stage in stages) == 3 + 3


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 99)), min_size=1, max_size=40))
@settings(max_examples=50)
def test_the_fullest_moment_is_the_peak_and_categories_add_up(lives):
    blocks = tuple(
        Block(start * 50 + n, start * 50 + n + life * 49, 0, 0, size, "Kernel", f"Default/layers-CellList/{n}-D/MatMul-op{n}",
              (), CATEGORIES[n % 6])
        for n, (start, life, size) in enumerate(lives)
    )  # fmt: skip
    peak = max(sum(b.size for b in blocks if b.alive(a.start)) for a in blocks)
    simulation = Simulation(0, 0, 1, 1, peak, peak, blocks, (), ())
    assert bytes_of(fullest(moments_of(simulation))) == peak == max(used for _, used in simulation.memory_over_time())


def test_a_profile_is_kept_as_it_is(tmp_path):
    product = "Gradients/Default/network-M/layers-CellList/3-D/Grad_MatMul/MatMul-op7"
    weight = "model.layers.3.attention.wq.weight"
    blocks = (
        Block(1, None, 0, 0, 512, "Weight", weight, (), CATEGORIES[0]),
        Block(2, 9, 512, 0, 1024, "Kernel", product, (), ACTIVATIONS),
    )
    one = profile_of(Simulation(4, 1, 1, 1, 1536, 2048, blocks, (), (), ("message",)))
    save_profile(one, tmp_path / "a.profile")
    assert load_profile(tmp_path / "a.profile") == one
    assert {use.path for use in one.peak} == {"model.layers.*.attention.wq.weight", "layers.*"}


def test_a_thinned_timeline_keeps_its_highest_point():
    points = [(time, (time * 7919) % 1000) for time in range(10000)]
    kept = thinned(points, 100)
    assert len(kept) <= 200
    assert max(used for _, used in kept) == 999
    assert kept == sorted(kept)


def limit_for(config, number):
    return [profile(config, stage.rank).used_peak for stage in stages_of(config)][number]


def test_advice_names_the_shortage_and_what_closes_it():
    config = pipeline(4, 32, 16)
    simulations = FormulaSimulations()
    memories = simulate_stages(config, stages_of(config), simulations)
    needs = [memory.device_peak // MIB for memory in memories]
    limit = (needs[1] + 10) * MIB
    text = shortage(memories, config, limit, simulations)
    short = -(-(memories[0].device_peak - limit) // MIB)
    peak, gb = memories[0].device_peak, gigabytes([memories[0].device_peak])
    assert f"stage 0 (rank 0) needs {gb(peak)} GB, {gb.at_least(peak - limit)} GB more than the limit" in text
    full = -(-short // 160)  # 4 micro-batches of 50 - 10 MB each
    assert f"full recompute of {full} more layers of stage 0" in text
    assert f"--recompute_config.recompute='[{full}, 0, 0, 0]'" in text
    select = -(-short // 80)
    assert f"select recompute of {select} more layers of stage 0" in text
    assert "2 layers of stage 0 given to stage 3" in text
    assert "--model.model_config.offset='[-2, 0, 0, 2]'" in text
    for line in text.splitlines():
        if "recompute of" in line:  # an option of a shell, as it is printed
            options = [word for word in shlex.split(line) if word.startswith("--")]
            assert override_config(config, options) != config


def test_advice_admits_that_nothing_helps():
    config = pipeline(2, 8, 8)
    simulations = FormulaSimulations()
    memories = simulate_stages(config, stages_of(config), simulations)
    text = shortage(memories, config, 100 * MIB, simulations)
    assert "no single change closes it: select recompute of all layers of stage 0 leaves it" in text
    stages = [stage for request in simulations.asked for stage in stages_of(request.config)]
    assert {len(stage.runs) for stage in stages} == {1}  # no mixtures, since not even all layers are enough


def test_advice_begins_nothing_after_its_time():
    config = pipeline(2, 8, 8)
    simulations = FormulaSimulations()
    memories = simulate_stages(config, stages_of(config), simulations)
    simulations.asked.clear()
    text = shortage(memories, config, memories[0].device_peak - MIB, simulations, seconds=0)
    assert "nothing was found yet\nnot tried in 0 s: select recompute, full recompute" in text
    assert simulations.asked == []


def test_advice_begins_with_what_formulas_expect_to_be_enough(monkeypatch):
    """Of 8 layers that keep 4 micro-batches, selected ones leave it short: in the time for one change the other is tried."""
    config = pipeline(4, 32, 16)
    simulations = FormulaSimulations()
    memories = simulate_stages(config, stages_of(config), simulations)[:1]
    keys = {"recompute_config.recompute": [8, 0, 0, 0]}
    now, then = (stage_bytes(workload_of(run))[0] for run in (config, override_config(config, keys)))
    limit = int(memories[0].device_peak * (then / now * 1.02))
    moments = iter([0.0, 0.0, 30.0])
    monkeypatch.setattr("mindllm.dry_run.advice.time", SimpleNamespace(monotonic=lambda: next(moments)))
    text = shortage(memories, config, limit, simulations, seconds=20)
    assert "not tried in 20 s: layers on other stages, " in text
    assert "select recompute" in text.partition("not tried")[2]
    assert "full recompute" not in text.partition("not tried")[2]


def test_advice_simulates_no_whole_stages():
    config = pipeline(2, 16, 16)
    simulations = Bent(BACKWARD, lambda layers, micro: layers**3)
    memories = simulate_stages(config, stages_of(config), simulations)
    simulations.asked.clear()
    text = shortage(memories, config, memories[0].device_peak - MIB, simulations)
    assert max(stage.layers for request in simulations.asked for stage in stages_of(request.config)) <= 4
    assert "select" not in text


def test_advice_says_what_parameters_in_half_precision_do_to_precision(monkeypatch):
    config = pipeline(2, 8, 8)
    memories = simulate_stages(config, stages_of(config), FormulaSimulations())[:1]

    def only_half_fits(changed, stages, *_, **__):
        is_half = changed.model.config.param_init_type == "float16"
        return [SimpleNamespace(stage=stage, device_peak=100 * MIB) for stage in stages if is_half]

    monkeypatch.setattr("mindllm.dry_run.advice.forecast_stages", only_half_fits)
    text = shortage(memories, config, memories[0].device_peak - MIB, FormulaSimulations())
    (line,) = (line for line in text.splitlines() if line.startswith("  - "))
    assert "updates below 1/4096 of a weight are lost, unless optimizer.master_weights keeps float32 copies" in line
    assert line.endswith("--model.model_config.param_init_type=float16")


def test_advice_says_what_communication_that_is_not_repeated_costs():
    """8 recomputed layers of the first stage, 4 micro-batches, 15 MB each."""
    recompute = {"recompute": [8, 0, 0, 0], "mp_comm_recompute": False}
    config = pipeline(4, 32, 16, tp=2, recompute_config=recompute)
    simulations = FormulaSimulations()
    memories = simulate_stages(config, stages_of(config), simulations)
    limit = memories[0].device_peak - 100 * MIB
    short = [memory for memory in memories if memory.device_peak > limit]
    first = shortage(short[:1], config, limit, simulations)
    assert "results of tensor-parallel communication not kept in recomputed layers (at most " in first
    assert "saves 0.469 GB of stage 0): --recompute_config.mp_comm_recompute=true" in first
    tight = shortage(short[:1], config, 100 * MIB, simulations)
    assert "--recompute_config.mp_comm_recompute=true saves 0.469 GB of stage 0 and leaves stage 0 " in tight
    repeated = pipeline(4, 32, 16, tp=2, recompute_config={"recompute": [8, 0, 0, 0]})
    memories = simulate_stages(repeated, stages_of(repeated), simulations)
    assert "mp_comm_recompute" not in shortage(memories[:1], repeated, 100 * MIB, simulations)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_stage_has_a_place(stages):
    places = [stage.place for stage in stages_of(pipeline(stages, 8, stages))]
    assert places == {1: ["only"], 2: ["first", "last"], 4: ["first", "middle", "middle", "last"]}[stages]


def test_a_short_last_stage_is_advised_to_slice_its_loss():
    config, simulations = pipeline(2, 8, 8), FormulaSimulations()
    memories = forecast_stages(config, stages_of(config), simulations)
    last = memories[-1]
    text = shortage([last], config, last.device_peak - 40 * MIB, simulations)
    assert f"saves 0.044 GB of stage {last.stage.number}): --model.model_config.loss_chunks=4" in text
    assert "loss_chunks" not in shortage(memories[:1], config, memories[0].device_peak - MIB, simulations)


def test_which_input_comes_last_does_not_tell_moments_apart():
    """As with memory_optimize_level O1, where operators share one block and inputs are all that is allocated beside it."""
    shared = Block(0, 9, 0, 0, 100, "Kernel", "SomasMemory", (), OTHER)
    for last in ("inputs0", "inputs3"):
        given = Block(1, 8, 100, 0, 1, "Kernel", last, (), OTHER)
        simulation = Simulation(0, 0, 1, 1, 101, 101, (shared, given), (), ())
        assert list(moments_of(simulation)) == ["inputs and parameters"]
