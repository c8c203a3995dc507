"""MindSpore's own dry run of small ranks: memory that adds up, the order of execution, what is exchanged with whom."""

import math
import resource
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from simulations import needs_compiler
from small_cluster import MODEL, cluster_run

from mindllm.compiled.simulation.simulate_rank import check_simulated, simulate_rank, unknown_lines
from mindllm.compiled.simulation.simulation import ACTIVATIONS, CATEGORIES, COMMUNICATION, GRADIENTS, OPTIMIZER, WEIGHTS
from mindllm.errors import UserError

pytestmark = needs_compiler
ALL = ("all first", "all last", "tp2", "tp2 full", "interleaved")
ROUNDING = 1024  # the pool adds up to this many bytes to a block


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tp2", marks=pytest.mark.simulates("tp2")),
        *(pytest.param(name, marks=[pytest.mark.simulates(name), pytest.mark.slow]) for name in ALL if name != "tp2"),
    ],
)
def test_every_byte_of_the_peak_has_a_category(simulated, name):
    simulation = simulated(name)
    parts = simulation.peak_by_category()
    assert tuple(parts) == CATEGORIES
    assert sum(parts.values()) == simulation.used_peak <= simulation.actual_peak
    assert all(parts[part] > 0 for part in (WEIGHTS, OPTIMIZER, ACTIVATIONS))
    assert simulation.fits
    assert simulation.messages == ()


@pytest.mark.simulates("tp2")
def test_the_lines_a_dry_run_ends_with(simulated):
    simulation = simulated("tp2")
    assert simulation.lines() == [
        "Device MOC memory size: 65536M",
        "MindSpore Used memory size: 59392M",
        "MindSpore memory base address: 0",
        f"Used peak memory usage (without fragments): {simulation.used_peak >> 20}M",
        f"Actual peak memory usage (with fragments): {simulation.actual_peak >> 20}M",
    ]


@pytest.mark.simulates("all first", "all last")
def test_parameters_are_held_as_the_slices_the_configuration_says(simulated):
    sizes = {block.node: block.size for block in simulated("all first").blocks if block.kind == "Weight"}
    assert len([name for name in sizes if name.startswith("model.layers.")]) == 3 * 9
    hidden, inner = MODEL["hidden_size"], MODEL["intermediate_size"]
    for name, shape in (("attention.wq.weight", (hidden, hidden)), ("feed_forward.w2.weight", (hidden, inner))):
        sliced = 4 * math.prod(shape) // (2 * 2)  # fp32, over tensor parallel ranks and optimizer slices
        for prefix in ("", "adam_m.", "adam_v."):
            assert sliced <= sizes[f"{prefix}model.layers.2.{name}"] <= sliced + ROUNDING
        assert 2 * sliced <= sizes[f"accu_grads.model.layers.2.{name}"] <= 2 * sliced + ROUNDING
    last = {block.node for block in simulated("all last").blocks if block.kind == "Weight"}
    assert "model.layers.5.attention.wq.weight" in last
    assert not last & set(sizes) - {"beta1_power", "beta2_power"}


@pytest.mark.simulates("logits", "logits in slices")
def test_the_logits_of_one_slice_are_there_at_a_time(simulated):
    whole, sliced = (simulated(name).peak_by_category()[ACTIVATIONS] for name in ("logits", "logits in slices"))
    assert sliced < 0.5 * whole


@pytest.mark.simulates("galore")
def test_projected_updates_hold_no_second_copy_of_the_gradients(simulated):
    """The compiler copies what a branch reads, and all of it before the branch, unless nothing else reads it."""
    simulation = simulated("galore")
    weights = [block.size for block in simulation.blocks if block.node.startswith("model.layers.")]
    assert len(weights) == 2 * 9
    alive = (block for block in simulation.alive(simulation.peak_time) if block.kind != "Weight")
    assert sum(block.size for block in alive if block.category == OPTIMIZER) < 0.25 * sum(weights)


@pytest.mark.simulates("tp2", "tp2 full")
def test_full_recomputation_saves_activations_and_nothing_else(simulated):
    kept, again = (simulated(name).peak_by_category() for name in ("tp2", "tp2 full"))
    assert again[ACTIVATIONS] < 0.8 * kept[ACTIVATIONS]
    assert again[WEIGHTS] == kept[WEIGHTS]
    runs = [Counter(task.operator for task in simulated(name).tasks) for name in ("tp2", "tp2 full")]
    assert [run["FlashAttentionScore"] for run in runs] == [2, 4]
    assert [run["FlashAttentionScoreGrad"] for run in runs] == [2, 2]


@pytest.mark.simulates("dropout")
def test_what_is_dropped_is_drawn_as_a_recomputed_layer_begins(simulated):
    """It needs nothing but the batch, and could be there for all layers from the start."""
    simulation = simulated("dropout")
    drawn = [block for block in simulation.blocks if block.path.endswith(".drop") and block.operator == "Cast"]
    of_attention = [block for block in drawn if ".attention.attention." in block.path]
    assert len(of_attention) == 4 * 2  # in each layer, forward and once more
    for block in drawn:
        alive = {other.path.split(".layers.")[1].split(".")[0] for other in drawn if other.alive(block.start)}
        assert len(alive) == 1


@pytest.mark.simulates("all first", "all last")
def test_stages_exchange_every_micro_batch(simulated):
    first, last = simulated("all first"), simulated("all last")
    for simulation, sends, receives, peer in ((first, False, True, 4), (last, True, False, 3)):
        for operator, backward in (("Send", sends), ("Receive", receives)):
            moved = [exchange for exchange in simulation.collectives if exchange.operator == operator]
            assert [exchange.backward for exchange in moved] == [backward] * 4
            assert {exchange.peer for exchange in moved} == {peer}
    tensor_parallel = [exchange for exchange in first.collectives if exchange.ranks == (0, 1)]
    assert {exchange.operator for exchange in tensor_parallel} >= {"AllGather", "ReduceScatter"}
    gathered = [exchange for exchange in tensor_parallel if exchange.operator == "AllGather"]
    assert all(exchange.received == 2 * exchange.sent for exchange in gathered)


@pytest.mark.simulates("all first")
def test_one_forward_one_backward(simulated):
    """The first of two stages computes two micro batches ahead, then one backward and one forward in turn."""
    tasks = [task for task in simulated("all first").tasks if task.operator.startswith("FlashAttentionScore")]
    assert [task.time for task in tasks] == sorted(task.time for task in tasks)
    per_pass = [task.operator == "FlashAttentionScoreGrad" for task in tasks[::3]]
    assert per_pass == [False, False, True, False, True, False, True, True]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.simulates(name, f"{name}, whole")) for name in ("all last", "experts first")],
)
def test_layers_of_other_stages_change_nothing(simulated, name):
    own, whole = simulated(name), simulated(f"{name}, whole")
    assert [task.node for task in own.tasks if task.operator] == [task.node for task in whole.tasks if task.operator]
    assert Counter((block.size, block.path) for block in own.blocks) == Counter(
        (block.size, block.path) for block in whole.blocks
    )
    assert own.used_peak == pytest.approx(whole.used_peak, rel=1e-3)


@pytest.mark.simulates("interleaved")
def test_chunks_of_a_stage_keep_their_layers(simulated):
    simulation = simulated("interleaved")
    layers = {task.path.split(".layers.")[1].split(".")[0] for task in simulation.tasks if ".layers." in task.path}
    assert layers == {"0", "2"}
    assert len([exchange for exchange in simulation.collectives if exchange.operator == "Send"]) == 8 + 4


@pytest.mark.simulates("all first", "tp2")
def test_memory_that_is_freed_and_memory_that_stays(simulated):
    simulation = simulated("all first")
    assert {block.category for block in simulation.blocks if block.kind == "Weight"} >= {WEIGHTS, OPTIMIZER, GRADIENTS}
    assert all(block.end is None for block in simulation.blocks if block.kind == "Weight")
    assert any(block.category == COMMUNICATION and block.end is not None for block in simulation.blocks)
    overtime = simulation.memory_over_time()
    assert max(used for _, used in overtime) == simulation.used_peak
    assert overtime[-1][1] == sum(block.size for block in simulation.blocks if block.end is None)
    peak = simulation.alive(simulation.peak_time)
    assert [block.size for block in peak] == sorted((block.size for block in peak), reverse=True)


@pytest.mark.parametrize(("parallel", "refused"), [(False, True), (True, False)])
def test_gradients_that_stay_whole_are_not_accumulated_without_a_pipeline(parallel, refused):
    run = cluster_run(
        dp=2, runner_config={"gradient_accumulation_steps": 4}, parallel={"enable_parallel_optimizer": parallel}
    )
    for config in (run, cluster_run(), cluster_run(pp=2, micro=4)):
        if config is run and refused:
            with pytest.raises(
                UserError, match=r"parallel\.enable_parallel_optimizer: .*; write true, or runner_config"
            ):
                check_simulated(config)
        else:
            check_simulated(config)


def test_a_rank_that_cannot_be_simulated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="rank 4 does not exist: the configuration has 4 devices, 0 to 3"):
        simulate_rank(cluster_run(dp=2, tp=2), 4)
    with pytest.raises(UserError, match=r"context\.device_target: only Ascend devices are simulated \(value CPU\)"):
        simulate_rank(cluster_run(tp=2, context={"device_target": "CPU"}), 0)
    config = cluster_run(tp=2, recompute_config={"select_recompute": [r"feed_forward\.w9\.matmul"]})
    with pytest.raises(UserError, match=r"recompute_config\.select_recompute: pattern .*w9.* matches no operator"):
        simulate_rank(config, 0)
    assert not list(Path.cwd().iterdir())


def test_lines_of_mindspore_that_nobody_knows_are_shown():
    known = "[WARNING] ME(1,7f,python):2026 [mindspore/x.cc:1] Initialize] This is simulation mode with level 1."
    unknown = "[ERROR] DEVICE(1,7f,python):2026 [mindspore/x.cc:1] F] something new"
    assert unknown_lines("\n".join([known, unknown, "", unknown])) == [unknown]


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_take_no_memory_of_the_host(replicas):
    vocabulary, hidden = 300_000, 1024
    model = {"vocab_size": vocabulary, "hidden_size": hidden, "num_layers": 1}
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose children are the simulation's processes alone
        held, taken = pool.submit(_weights_and_memory, cluster_run(dp=replicas, model=model)).result()
    weights = 2 * vocabulary * hidden * 4  # of embedding and head; their moments and gradients have as much each
    assert held >= weights
    assert taken < weights


def _weights_and_memory(config):
    """Bytes of the weights of a simulated rank 0, and those that its process took of this machine."""
    held = simulate_rank(config, 0).peak_by_category()[WEIGHTS]
    return held, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
