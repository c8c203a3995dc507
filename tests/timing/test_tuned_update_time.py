"""The time and state of AdaLoRA's and GaLore's updates: what is counted, what follows from the layout, what is named instead."""

import math
from dataclasses import replace

import pytest

from mindllm.architecture.layer_counts import layer_counts
from mindllm.architecture.optimizer_state import further_state, is_projected, projected_shapes, state_shapes
from mindllm.config import RecomputeConfig
from mindllm.config.model import ModelConfig
from mindllm.errors import UserError
from mindllm.families import with_file_names
from mindllm.parallel.layer_plan import read_plan
from mindllm.timing.costs.tuned_update import layer_update, state_beside
from mindllm.timing.costs.work import FP32_BYTES, Exchange, Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.non_layer_cost import layer_parameters
from mindllm.timing.step import step_time
from mindllm.timing.step_work import step_work
from mindllm.timing.workload import Strategy, Workload

DEVICE = read_device(DEFAULT)
SIZES = {"vocab_size": 32000, "hidden_size": 4096, "num_heads": 32, "intermediate_size": 11008, "seq_length": 2048}
LORA = {"lora_rank": 16}
ADALORA = {"pet_type": "adalora", "adalora_init_r": 16, "adalora_target_r": 8}
GALORE = {"pet_type": "galore", "galore_rank": 128, "galore_update_proj_gap": 200}


def workload(pet, layers=4, **strategy):
    """A decoder of Llama's widths, tuned so."""
    sizes = Strategy(**strategy)
    model = ModelConfig.model_validate({**SIZES, "num_layers": layers, "pet_config": pet})
    architecture = with_file_names(model).architecture
    counts = layer_counts(layers, sizes.pipeline_stage, 1, 0)
    plan = read_plan(counts, RecomputeConfig(), lambda key, said: UserError(key + said))
    return Workload(architecture, SIZES["seq_length"], sizes, plan)


def operators(work):
    return [one for one in work if isinstance(one, Operator)]


def test_only_adamw_takes_time_beside_adapters_of_lora():
    run = workload(LORA)
    assert step_work(run).updates[0].beside == ()
    assert step_time(run, DEVICE).uncounted == ()


def test_every_step_of_galore_projects_and_every_so_many_find_projections_anew():
    run = workload(GALORE)
    spec = run.architecture.layers[0]
    matrices = [shape for name, shape in spec.weights().items() if len(shape) == 2]
    step, refresh = layer_update(spec, run)
    assert sum(one.flops for one in operators(step.work)) == sum(4 * math.prod(shape) * 128 for shape in matrices)
    expected = sum(2 * math.prod(shape) * min(shape) + 16 * 2 * min(shape) ** 2 * 128 for shape in matrices)
    assert sum(one.flops for one in operators(refresh.work)) == expected
    assert (step.times, refresh.times) == (1.0, 1 / 200)
    seconds = {
        gap: step_time(workload({**GALORE, "galore_update_proj_gap": gap}), DEVICE).ends[0].update
        for gap in (1, 2, 200)
    }
    assert seconds[1] - seconds[2] == pytest.approx((seconds[1] - seconds[200]) * 0.5 / (1 - 1 / 200))
    assert seconds[200] > 1.5 * step_time(workload(None), DEVICE).ends[0].update


def test_what_no_description_of_a_device_tells_is_named():
    (galore,) = step_time(workload(GALORE), DEVICE).uncounted
    (adalora,) = step_time(workload(ADALORA), DEVICE).uncounted
    assert galore == "QR of GaLore's 16 rounds for new projections, every 200 steps (no device's description tells)"
    assert adalora == f"the order of AdaLoRA's {4 * 7 * 16} scores, every step (no device's description tells)"


def test_the_choice_of_ranks_is_work_of_every_layer_and_one_sum_over_all_devices():
    one, two = (step_work(workload(ADALORA, layers)).updates[0].beside for layers in (4, 8))
    assert [part.times for part in one] == [4.0, 1.0]
    assert [part.times for part in two] == [8.0, 1.0]
    assert len(one[0].work) == len(two[0].work)
    shared = step_work(workload(ADALORA, data_parallel=2, pipeline_stage=2, micro_batches=2))
    sums = [item for item in shared.updates[1].beside[-1].work if isinstance(item, Exchange)]
    assert [(item.op, item.axis, item.bytes) for item in sums] == [("AllReduce", "all", FP32_BYTES * 4 * 7 * 16)]
    added = step_time(workload(ADALORA), DEVICE).ends[0].update - step_time(workload(LORA), DEVICE).ends[0].update
    launches = sum(part.times * len(operators(part.work)) for part in one)
    assert added >= launches * DEVICE.efficiency.launch.value


def test_parts_of_weights_are_added_over_the_devices_that_have_the_rest():
    def axes(pet, **strategy):
        run = workload(pet, **strategy)
        work = [item for part in layer_update(run.architecture.layers[0], run) for item in part.work]
        return {(item.name.split(".")[1], item.axis) for item in work if isinstance(item, Exchange)}

    assert axes(GALORE) == axes(ADALORA) == set()
    assert axes(ADALORA, model_parallel=2) == {(name, "tp") for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")}
    assert {axis for _, axis in axes(GALORE, data_parallel=2, optimizer_shard=True)} == {"share"}
    whole, parts = (workload(GALORE, model_parallel=ways) for ways in (1, 4))
    flops = [
        sum(one.flops for one in operators(layer_update(run.architecture.layers[0], run)[0].work))
        for run in (whole, parts)
    ]
    assert flops[0] == 4 * flops[1]


@pytest.mark.parametrize("pet", [GALORE, ADALORA])
def test_state_is_that_of_checkpoints(pet):
    """But for what has one axis: values of adapters, ranks that were kept, counters."""
    run = workload(pet)
    trained = run.architecture.trained_shapes()
    shapes = {**state_shapes(trained), **further_state(run.architecture)}
    state = FP32_BYTES * sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    beside = sum(state_beside(spec, run.strategy, run.architecture.pet) for spec in run.architecture.layers)
    assert 2 * FP32_BYTES * sum(math.prod(shape) for shape in trained.values() if len(shape) == 2) + beside == state


def test_moments_of_galore_are_cut_where_the_weight_is_and_projections_are_not():
    run = workload(GALORE)
    spec, pet = run.architecture.layers[0], run.architecture.pet
    shared = replace(run.strategy, data_parallel=4, optimizer_shard=True)
    expected = 0.0
    for name, shape in spec.weights().items():
        if is_projected(f"model.layers.0.{name}", shape):
            projection, low = projected_shapes(shape, 128)
            ways = 4 if shape[0] >= shape[1] else 1
            expected += FP32_BYTES * (2 * math.prod(low) / ways + math.prod(projection) - 2 * math.prod(shape) / 4)
    assert layer_parameters(spec, shared, pet).state == expected
    # Two sequences: both runs peak in the loss, so their difference is that of the state.
    full, tuned = (workload(pet, data_parallel=4, optimizer_shard=True, micro_batch_size=2) for pet in (None, GALORE))
    assert stage_bytes(tuned)[0] - stage_bytes(full)[0] == pytest.approx(4 * expected)
