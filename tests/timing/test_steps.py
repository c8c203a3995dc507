"""Predicted steps: what they are made of, how they follow a strategy, and how calibration finds constants again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindllm.architecture.layer_counts import layer_counts
from mindllm.architecture.parts import ACTIVATION_OPERATORS
from mindllm.config import RecomputeConfig, load_config, override_config
from mindllm.config.model import ModelConfig
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import read_plan
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.layer import backward_work, forward_work, repeated_work
from mindllm.timing.costs.work import Exchange, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.measured.calibrate import Measured, calibrate, constants, uncalibrated, with_constants
from mindllm.timing.memory import kept_bytes, stage_bytes
from mindllm.timing.step import blocked, step_seconds, step_time
from mindllm.timing.step_work import step_work
from mindllm.timing.weight_memory import kept_of_weights
from mindllm.timing.workload import Numerics, Strategy, Workload

DEVICE = read_device(DEFAULT)
SHIPPED = Path(__file__).parents[2] / "configs"
LORA = SHIPPED / "llama2/finetune_llama2_7b_lora.yaml"
SIZES = {"vocab_size": 32000, "hidden_size": 4096, "num_heads": 32, "intermediate_size": 11008, "seq_length": 2048}


def workload(layers=8, recompute=None, chunks=1, hidden_act="silu", **strategy):
    """A decoder of Llama's widths."""
    sizes = Strategy(**strategy)
    architecture = ModelConfig.model_validate({**SIZES, "num_layers": layers, "hidden_act": hidden_act}).architecture
    counts = layer_counts(layers, sizes.pipeline_stage, chunks, 0)
    plan = read_plan(counts, RecomputeConfig.model_validate(recompute or {}), lambda key, said: UserError(key + said))
    return Workload(architecture, SIZES["seq_length"], sizes, plan)


def test_products_of_a_layer_have_the_flops_that_the_architecture_counts():
    """Attention in one kernel leaves out half of the scores, and its backward pass has five products for two."""
    run = workload(layers=1)
    forward = forward_work(run.architecture.layers[0], 2048.0, 2048, run.strategy, run.numerics)
    both = [one for one in (*forward, *backward_work(forward)) if isinstance(one, Operator)]
    products = sum(one.flops for one in both if one.sizes)
    spec = run.architecture.layers[0]
    scores = 12.0 * spec.attention.num_heads * spec.attention.head_dim * 2048
    assert products == pytest.approx(2048 * (spec.flops_per_token(2048) - scores))
    assert sum(one.flops for one in both if one.kind == "attention") == pytest.approx(
        2048 * scores / 12 * 4 * 0.5 * 3.5
    )


def test_tensor_parallel_ranks_share_products_and_exchange_twice_a_pass():
    strategy = Strategy(model_parallel=4)
    run = workload(layers=1)
    alone, shared = (
        forward_work(run.architecture.layers[0], 64.0, 64, one, run.numerics) for one in (run.strategy, strategy)
    )
    flops = [sum(one.flops for one in work if isinstance(one, Operator)) for work in (alone, shared)]
    assert flops[0] == pytest.approx(4 * flops[1])
    assert [one.op for one in shared if isinstance(one, Exchange)] == ["AllReduce", "AllReduce"]
    gathered = forward_work(
        run.architecture.layers[0], 64.0, 64, replace(strategy, sequence_parallel=True), run.numerics
    )
    assert [one.op for one in gathered if isinstance(one, Exchange)] == ["AllGather", "ReduceScatter"] * 2


@pytest.mark.parametrize("act", ["gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("pattern", [True, [r"feed_forward\.w1\.activation\..*"]])
def test_any_activation_is_selected_by_the_name_of_its_operator(act, pattern):
    run = workload(layers=1, recompute={"select_recompute": pattern}, hidden_act=act)
    forward = forward_work(run.architecture.layers[0], 64.0, 64, run.strategy, run.numerics)
    again = {one.name for one in repeated_work(forward, run.plan.layers[0])}
    activation = f"feed_forward.w1.activation.{ACTIVATION_OPERATORS[act]}"
    assert again == {activation} | ({"feed_forward.mul"} if pattern is True else set())


@pytest.mark.parametrize("name", ["qwen2_moe/pretrain_qwen2_moe_57b", "deepseek/pretrain_deepseek_v2_lite"])
def test_experts_are_selected_like_a_dense_feed_forward(name):
    changes = {"recompute_config.recompute": False, "recompute_config.select_recompute": True}
    run = workload_of(override_config(load_config(SHIPPED / f"{name}.yaml"), changes))
    forward = forward_work(run.architecture.layers[-1], 64.0, 64, run.strategy, run.numerics)
    again = {one.name for one in repeated_work(forward, run.plan.layers[-1])}
    at = ("feed_forward.experts", "feed_forward.shared")
    assert again == {f"{where}.mul" for where in at} | {f"{at[0]}.activation.silu", f"{at[1]}.w1.activation.silu"}


@pytest.mark.parametrize(
    ("recompute", "named"),
    [
        ({"select_recompute": True}, []),
        ({"select_recompute": [r"feed_forward\.mul", r"attention\.merger\.reshape"]}, [r"attention\.merger\.reshape"]),
        (
            {"recompute": True, "select_recompute_exclude": [r"attention\.merger\.reshape"]},
            [r"attention\.merger\.reshape"],
        ),
        ({"recompute": True, "select_recompute": [r"attention\.merger\.reshape"]}, []),
    ],
)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_patterns_that_name_nothing_of_the_model_of_time_are_said(recompute, named, act):
    said = step_time(workload(recompute=recompute, hidden_act=act), DEVICE).uncounted
    assert [one.split("'")[1] for one in said] == named


def test_a_pattern_of_layers_with_experts_is_known_where_one_layer_has_them():
    config = load_config(SHIPPED / "deepseek/pretrain_deepseek_v2_lite.yaml")
    config = override_config(
        config,
        {"recompute_config.recompute": False, "recompute_config.select_recompute": [r"feed_forward\.experts\.mul"]},
    )
    assert step_time(workload_of(config), DEVICE).uncounted == ()


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ({}, set()),
        ({"select_recompute": True}, {"feed_forward.mul", "feed_forward.w1.activation.silu"}),
        ({"select_comm_recompute": True}, set()),
        ({"recompute": True, "select_recompute_exclude": [r"feed_forward\.mul"]}, {"feed_forward.w1.activation.silu"}),
    ],
)
def test_what_is_computed_again_is_what_the_patterns_say(recompute, expected):
    run = workload(layers=1, recompute=recompute)
    forward = forward_work(run.architecture.layers[0], 64.0, 64, run.strategy, run.numerics)
    again = {one.name for one in repeated_work(forward, run.plan.layers[0]) if one.name.startswith("feed_forward")}
    assert {name for name in again if name.endswith((".mul", "silu"))} == {
        name for name in expected if name.endswith((".mul", "silu"))
    }


@pytest.mark.parametrize(
    ("recompute", "gathers"),
    [
        ({"select_comm_recompute": True}, {"attention_norm.gather", "ffn_norm.gather"}),
        ({"select_comm_recompute": [r"ffn_norm\.norm"]}, {"ffn_norm.gather"}),
        ({"recompute": True, "select_comm_recompute_exclude": [r"ffn_norm\.norm"]}, {"attention_norm.gather"}),
    ],
)
def test_the_pattern_of_a_norm_selects_the_gather_of_its_result(recompute, gathers):
    run = workload(layers=1, recompute=recompute, model_parallel=2, sequence_parallel=True)
    forward = forward_work(run.architecture.layers[0], 64.0, 64, run.strategy, run.numerics)
    assert {one.name for one in repeated_work(forward, run.plan.layers[0]) if one.name.endswith("gather")} == gathers


def test_recomputation_costs_time_and_saves_memory():
    kept, again = (workload(recompute=how, micro_batches=4, micro_batch_size=4) for how in (None, {"recompute": True}))
    assert step_time(again, DEVICE).seconds > 1.2 * step_time(kept, DEVICE).seconds
    assert stage_bytes(again)[0] < stage_bytes(kept)[0]


def test_a_pipeline_waits_for_its_first_and_last_micro_batch():
    """Equal stages but for the ends: (m + p - 1) passes of a stage, and at least the bubble of Narayanan et al. (2021)."""
    sizes = {"pipeline_stage": 4, "micro_batches": 16}
    step = step_time(workload(layers=16, **sizes), DEVICE)
    middle = step.forward[1].seconds + step.backward[1].seconds
    assert step.line.makespan >= 19 * middle
    assert step.seconds == pytest.approx(
        step.line.makespan + max(end.seconds for end in step.ends) + DEVICE.step_overhead.value
    )


def test_accumulation_repeats_passes_but_not_the_update():
    once, twice = (step_time(workload(accumulation=count), DEVICE) for count in (1, 2))
    assert twice.seconds - once.seconds == pytest.approx(once.line.makespan)
    assert twice.workload.tokens == 2 * once.workload.tokens


def test_steps_on_several_devices_at_once_are_those_of_each():
    run = workload(layers=8, pipeline_stage=4, micro_batches=8)
    devices = [DEVICE, uncalibrated(DEVICE), read_device("a100_80g")]
    assert step_seconds(run, devices) == pytest.approx([step_time(run, device).seconds for device in devices])


def test_a_dtype_that_the_device_lacks_is_an_error():
    with pytest.raises(UserError, match="has no float8"):
        step_time(replace(workload(), numerics=Numerics("float8")), DEVICE)


def test_a_loss_in_slices_computes_the_heads_product_again_and_holds_fewer_logits():
    whole = workload(pipeline_stage=2, micro_batches=4, micro_batch_size=4)
    sliced = replace(whole, loss_chunks=4)
    head, again = step_work(sliced).parts["head"].forward, step_work(sliced).parts["head"].repeated
    works = (head, again, step_work(whole).parts["head"].forward)
    flops = [sum(one.flops for one in work if isinstance(one, Operator)) for work in works]
    assert flops[0] == flops[1] == flops[2]
    assert [one.name for one in again].count("lm_head.matmul") == 4
    assert step_work(whole).parts["head"].repeated == ()
    first, last = ([step.backward[at].compute for step in map(step_on_device, (whole, sliced))] for at in (0, -1))
    assert "recomputation" in last[1]
    assert "recomputation" not in last[0]
    assert first[0] == first[1]
    saved = np.array(stage_bytes(whole)) - np.array(stage_bytes(sliced))
    assert saved[0] == 0 < saved[1]


def step_on_device(run):
    return step_time(run, DEVICE)


def test_slices_have_gradients_of_the_weight_that_are_added_up():
    parts = [step_work(replace(workload(), loss_chunks=count)).parts["head"].backward for count in (1, 3)]
    assert [[one.name for one in part].count("lm_head.weight_sum") for part in parts] == [0, 2]


@pytest.mark.parametrize(("stages", "tied", "sent"), [(1, True, False), (4, False, False), (4, True, True)])
def test_a_table_that_two_stages_share_is_sent_and_waited_for_beyond_the_first_micro_batch(stages, tied, sent):
    run = workload(layers=16, pipeline_stage=stages, micro_batches=4)
    head = replace(run.architecture.head, tied=tied)
    run = replace(run, architecture=replace(run.architecture, head=head))
    assert (step_work(run).table is not None) == sent
    end = step_time(run, DEVICE).ends[0]
    slow = DEVICE.model_copy(update={"links": tuple(_slowed(link) for link in DEVICE.links)})
    late = step_time(run, slow).ends[0]
    assert (end.hidden > 0) == sent  # one replica: nothing else is exchanged
    assert end.exposed == 0
    assert (late.exposed > 0) == sent


def _slowed(link):
    return link.model_copy(update={"bandwidth": link.bandwidth.model_copy(update={"value": 1e6})})


KERNEL = r"attention\.attention\.flash_attention"


def _swapping(pattern, ahead):
    run = workload(layers=4, pipeline_stage=2, micro_batches=4)
    return run, replace(run, swap=((), ((pattern, ahead),), (), ()))


def _on_host(bandwidth):
    return DEVICE.model_copy(update={"host_bandwidth": DEVICE.host_bandwidth.model_copy(update={"value": bandwidth})})


@pytest.mark.parametrize(("pattern", "hidden_sizes"), [(KERNEL, 1), (r"attention\.w[qkv]\.matmul", 3), ("", None)])
def test_results_that_wait_on_the_host_leave_the_device(pattern, hidden_sizes):
    """The kernel yields a hidden state; queries, keys, values are one each; without a pattern all results of a layer go, and
    the matrices stay that its products read in half precision."""
    run, swapping = _swapping(pattern, 2)
    saved = np.array(stage_bytes(run)) - np.array(stage_bytes(swapping))
    away = 1  # of the two micro-batches that the first of two stages keeps, the other one is back in its backward pass
    expected = away * (kept_bytes(run)[1] - kept_of_weights(run, run.architecture.layers[1]))
    if hidden_sizes:
        expected = away * hidden_sizes * 2 * run.rank_tokens * SIZES["hidden_size"]
    assert saved.tolist() == pytest.approx([expected, 0])


def test_copies_are_waited_for_where_they_take_longer_than_what_runs_beside_them():
    run, swapping = _swapping(KERNEL, 2)
    plain = step_time(run, DEVICE)
    fast, soon, slow = (step_time(swapping, _on_host(rate)) for rate in (1e15, 5e9, 1e7))
    assert fast.seconds == plain.seconds
    assert "copies of the host" not in soon.forward[0].exchanged  # hidden behind the pass
    assert "copies of the host" in soon.backward[0].exchanged  # two operators are not long enough
    assert slow.forward[0].seconds == pytest.approx(2 * run.rank_tokens * SIZES["hidden_size"] / 1e7)
    assert slow.forward[1].seconds == plain.forward[1].seconds
    earlier = step_time(_swapping(KERNEL, 30)[1], _on_host(5e9))
    assert earlier.seconds < soon.seconds


def test_swapping_on_a_device_without_the_hosts_link_or_of_what_nobody_keeps_is_an_error():
    _, swapping = _swapping(KERNEL, 1)
    with pytest.raises(UserError, match="has no host_bandwidth"):
        step_time(swapping, read_device("atlas_900_a3"))
    with pytest.raises(UserError, match="'nothing', of whose results"):
        step_time(_swapping("nothing", 1)[1], DEVICE)


def test_passes_wait_for_an_exchange_with_one_neighbour_in_both_directions():
    assert blocked(np.array([1.0, 5.0]), 1).tolist() == [[1.0, 5.0, 0.0], [0.0, 1.0, 5.0]]
    assert blocked(np.array([1.0, 5.0]), 3).tolist() == [[0.5, 3.0, 2.5]] * 2, "in one call with both neighbours"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sums_of_gradients_run_behind_gradients_of_weights_where_the_device_says_so(sequence_parallel):
    """Korthikanti et al., 2022, table 4: backward passes of 11.9 and, sequence parallel, 11.8 ms; forward ones keep all of it."""
    device = read_device("a100_80g")
    waiting = device.model_copy(update={"gradient_overlap": None})
    run = workload(layers=1, model_parallel=8, sequence_parallel=sequence_parallel)
    hiding, whole = step_time(run, device), step_time(run, waiting)
    sums = "ReduceScatter" if sequence_parallel else "AllReduce"
    assert hiding.forward[0].exchanged == whole.forward[0].exchanged
    left = hiding.backward[0].exchanged[sums] / whole.backward[0].exchanged[sums]
    assert 0.45 < left < 0.7  # half of a layer's; embedding and loss are waited for
    assert hiding.backward[0].compute == whole.backward[0].compute
    assert (
        not sequence_parallel or hiding.backward[0].exchanged["AllGather"] == whole.backward[0].exchanged["AllGather"]
    )


def test_calibration_finds_the_device_that_made_the_steps():
    truth = with_constants(uncalibrated(DEVICE), {"matrix": 0.62, "HCCS": 0.55}, "the truth")
    runs = [workload(layers=4, micro_batch_size=size) for size in (1, 4)]
    runs += [workload(layers=4, model_parallel=size, micro_batches=2) for size in (2, 4, 8)]
    rows = [Measured(str(number), run, float(step_seconds(run, [truth])[0])) for number, run in enumerate(runs)]
    before = np.array([step_seconds(row.workload, [uncalibrated(DEVICE)])[0] / row.seconds for row in rows])
    found = calibrate(uncalibrated(DEVICE), rows, "measured here")
    after = np.array([step_seconds(row.workload, [found.device])[0] / row.seconds for row in rows])
    assert abs(before - 1).max() > 0.1
    assert abs(after - 1).max() < 0.02
    assert found.device.efficiency.matrix.assumed == found.before["matrix"]
    assert found.device.efficiency.matrix.source == "measured here"
    assert all(constant.of(found.device) <= constant.most for constant in constants(found.device).values())


def test_a_step_that_was_held_up_hardly_moves_a_calibration():
    """One of six takes 60% longer: the others are met as if it were not there."""
    truth = with_constants(uncalibrated(DEVICE), {"matrix": 0.62}, "the truth")
    runs = [workload(layers=4, micro_batch_size=size, model_parallel=tp) for size in (1, 2, 4) for tp in (1, 2)]
    seconds = [float(step_seconds(run, [truth])[0]) for run in runs]
    seconds[0] *= 1.6
    rows = [Measured(str(number), run, taken) for number, (run, taken) in enumerate(zip(runs, seconds, strict=True))]
    found = calibrate(uncalibrated(DEVICE), rows, "measured here").device
    others = np.array([step_seconds(row.workload, [found])[0] / row.seconds for row in rows[1:]])
    assert abs(others - 1).max() < 0.02


def test_gradients_are_added_up_by_kernels_of_their_own_where_products_do_not():
    """Every weight of the layer's products is read twice and written once, on the ranks that share it."""
    run = workload(layers=1, model_parallel=2)
    forward = forward_work(run.architecture.layers[0], 64.0, 64, run.strategy, Numerics(fused_attention=False))
    plain, adding = backward_work(forward), backward_work(forward, adds=True)
    sums = [one for one in adding if one.name.endswith(".sum")]
    assert [one for one in adding if one not in sums] == list(plain)
    weights = sum(np.prod(shape) for shape in run.architecture.layers[0].weights().values() if len(shape) == 2)
    assert sum(one.bytes for one in sums) == 3 * 2 * weights / 2
    step = replace(run, numerics=Numerics(adds_gradients=True))
    assert step_time(step, DEVICE).seconds > step_time(run, DEVICE).seconds


def test_a_scaled_loss_lengthens_the_update_alone():
    plain = workload(layers=2)
    scaled = replace(plain, numerics=Numerics(scaled_loss=True))
    ours, theirs = (step_work(one).updates[0] for one in (scaled, plain))
    assert ours.update.bytes - theirs.update.bytes == 20 * ours.parameters.trained
    assert step_work(scaled).parts["head"] == step_work(plain).parts["head"]


def test_frozen_weights_take_no_gradients_and_no_state():
    lora, full = load_config(LORA), load_config(LORA, ["--model.model_config.pet_config=null"])
    few, all_of_them = step_work(workload_of(lora)), step_work(workload_of(full))

    def flops(work):
        layer = next(part for key, part in work.parts.items() if not isinstance(key, str))
        return sum(one.flops for one in layer.backward if isinstance(one, Operator))

    assert 0.5 < flops(few) / flops(all_of_them) < 0.7
    held, whole = few.updates[0].parameters, all_of_them.updates[0].parameters
    adapters = lora.model.config.architecture.trained_parameter_count() / 2
    assert held.trained == adapters
    assert held.frozen == whole.trained
    whole_state = (
        "--parallel.enable_parallel_optimizer=false"  # shared, it is less than frozen weights, which every replica has
    )
    of_all = load_config(LORA, ["--model.model_config.pet_config=null", whole_state])
    assert stage_bytes(workload_of(lora))[0] < 0.5 * stage_bytes(workload_of(of_all))[0]
