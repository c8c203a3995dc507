"""Swapping marks what is named for the host, and refuses what would not be moved."""

from pathlib import Path

import numpy as np
import pytest
from small_cluster import cluster_run

from mindllm import verify
from mindllm.compiled.execute.rank_interpreter import CONTROL
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import load_config
from mindllm.config.recompute import ATTENTION, SwapConfig
from mindllm.errors import UserError
from mindllm.models.causal_lm import CausalLM
from mindllm.parallel.build import kernels_of
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.marks import apply_swap
from mindllm.parallel.operators import operators
from mindllm.parallel.recompute import apply_recompute
from mindllm.timing.configured import workload_of
from mindllm.timing.step_work import step_work

MUL = r"feed_forward\.mul"


def run(recompute=None, **swap):
    return cluster_run(pp=2, micro=2, recompute_config=recompute or {}, swap_config={"swap": True, **swap})


def marked(config):
    """Operators that come back from the host, and how early."""
    model, plan = CausalLM(config.model.config, kernels_of(config)), make_plan(config)
    apply_recompute(model.model.layers, plan, config)
    apply_swap(model.model.layers, plan, config)
    found = operators(model.model.layers)
    return {path: one.attrs["backward_prefetch"] for path, one in found.items() if one.attrs.get("offload")}


def test_attention_is_moved_where_nothing_is_named():
    assert marked(run(default_prefetch=3)) == {f"{n}.attention.attention.flash_attention": 3 for n in (0, 1)}


def test_operators_of_some_layers_are_moved():
    found = marked(run(op_swap=[{"op_name": [MUL], "layers": [1], "backward_prefetch": 2}]))
    assert found == {"1.feed_forward.mul": 2}


def test_of_a_whole_layer_what_is_computed_again_is_left_out():
    found = marked(run({"select_recompute": [MUL]}, layer_swap={"layers": [0]}))
    assert "0.feed_forward.w1.matmul" in found
    assert "0.feed_forward.mul" not in found
    assert not any(path.startswith("1.") for path in found)


@pytest.mark.parametrize(
    ("recompute", "swap", "said"),
    [
        ({"recompute": True}, {}, "layer 0 is fully recomputed"),
        ({"select_recompute": [MUL]}, {"op_swap": {"op_name": MUL}}, "names results that layer 0 recomputes"),
        ({}, {"op_swap": {"op_name": r"feed_forward\.mull"}}, "matches no operator"),
    ],
)
def test_what_would_not_be_moved_is_refused(recompute, swap, said):
    with pytest.raises(UserError, match=said):
        marked(run(recompute, **swap))


@pytest.mark.parametrize(
    ("stages", "swap", "said"),
    [
        (1, {"swap": True}, "a network that the micro-batches of a pipeline share"),
        (2, {"swap": True, "layer_swap": {"layers": [2]}}, "names layer 2, where layers have numbers from 0 to 1"),
        (2, {"op_swap": {"op_name": MUL}}, "nothing is moved to the host"),
        (2, {"swap": True, "layer_swap": {"layers": [-1]}}, "swap_config.layer_swap"),
    ],
)
def test_swapping_that_cannot_be_is_refused(stages, swap, said):
    with pytest.raises(UserError, match=said):
        cluster_run(pp=stages, micro=stages, swap_config=swap)


def test_the_first_entry_of_a_layer_counts():
    both = ({"op_name": MUL, "layers": [0], "backward_prefetch": 5}, {"op_name": MUL, "backward_prefetch": 2})
    swap = SwapConfig.model_validate({"swap": True, "op_swap": both})
    assert (swap.of_layer(0), swap.of_layer(1)) == ({MUL: 5}, {MUL: 2})
    assert SwapConfig().of_layer(0) == {}
    assert SwapConfig(swap=True).of_layer(1) == {ATTENTION: 1}


def test_a_copy_to_the_host_changes_no_value():
    value = np.arange(3.0)
    assert CONTROL["MoveTo"]((value, "CPU", True)) is value


def test_the_model_of_time_moves_what_is_marked():
    config = run(default_prefetch=3)
    ((moved,), _) = (part.moved for name, part in step_work(workload_of(config)).parts.items() if name != "embedding")
    model, paths = config.model.config, marked(config)
    assert set(paths.values()) == {moved.ahead}
    assert moved.bytes == 2 * config.runner_config.batch_size * model.seq_length * model.hidden_size


def test_a_smaller_run_moves_what_it_kept_of_the_named_layers():
    from mindllm.reduced_runs.model import reduce_model, single_device

    config = cluster_run(
        pp=2,
        micro=2,
        model={"num_layers": 8},
        swap_config={"swap": True, "op_swap": {"op_name": MUL, "layers": [0, 7]}},
    )
    small = reduce_model(config)
    assert small.model.config.num_layers < 8
    assert small.swap_config.of_layer(0) == {MUL: 1}
    assert not single_device(small).swap_config.swap


def test_stages_of_numbered_layers_are_simulated_as_they_are(monkeypatch):
    """Layers of small runs have other numbers; where nothing is simulated whole nothing is said of them."""
    from mindllm.dry_run import forecast
    from mindllm.parallel.stages import stages_of

    config, asked = run(op_swap={"op_name": MUL, "layers": [1]}), []
    monkeypatch.setattr(forecast, "simulate_stages", lambda config, stages, simulations: asked.append(config) or [])
    assert forecast.forecast_stages(config, stages_of(config), None, whole=False) == []
    assert not asked
    forecast.forecast_stages(config, stages_of(config), None)
    assert asked == [config]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "moved"), [(0, 8), (2, 10)])
def test_a_compiled_rank_moves_results_to_the_host_and_back(rank, moved):
    """Each way a MoveTo: of the four results of the fused kernel, and of the last layer's product of gate and input.

    What the backward pass does not read stays where it is: of the other products nothing is moved.
    """
    config = load_config(Path(verify.__file__).parent / "forms" / "swapped.yaml")
    nodes = [node.op for function in compile_rank(config, rank).functions for node in function.nodes]
    assert nodes.count("MoveTo") == moved
