"""The reference beside a model that learns preferences: its forward pass, its messages, and nothing where none is compared."""

from collections import Counter
from pathlib import Path

import pytest

from mindllm.compiled.graph.cost import bytes_of, cost
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import load_config
from mindllm.planning.costs.formula import plan_problem
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.work import Operator
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.step import step_time
from mindllm.timing.step_work import step_work
from mindllm.units import MIB

FORMS = Path(__file__).parents[2] / "mindllm/verify/forms"
PLAIN = ("recompute_config.recompute=false", "model.model_config.loss_chunks=1")
DEVICE = read_device(DEFAULT)


def form(name, *changes):
    return load_config(FORMS / f"{name}.yaml", [f"--{change}" for change in (*PLAIN, *changes)])


def products(work):
    return sum(one.flops for one in work if isinstance(one, Operator) and one.sizes)


def compared_with_alone(name="preferences_over_stages"):
    """Workloads of the same adapters and rows: beside a reference, and without one."""
    return [workload_of(form(name, f"preference.loss_type={loss}")) for loss in ("sigmoid", "simpo")]


def test_a_reference_adds_the_forward_pass_of_the_base_and_nothing_to_gradients():
    compared, alone = map(step_work, compared_with_alone())
    assert (alone.workload.reference, compared.workload.reference) == (None, compared.workload.reference)
    for part in compared.parts:
        beside = products(compared.parts[part].forward) - products(alone.parts[part].forward)
        adapters = sum(
            one.flops for one in alone.parts[part].forward if isinstance(one, Operator) and "adapter" in one.name
        )
        assert beside == products(alone.parts[part].forward) - adapters
        assert compared.parts[part].backward == alone.parts[part].backward
    assert compared.sent.bytes == 2 * alone.sent.bytes


def test_a_step_is_longer_by_less_than_it_computes_more():
    compared, alone = (step_time(one, DEVICE) for one in compared_with_alone())
    assert alone.seconds < compared.seconds < 2 * alone.seconds
    model = form("preferences_over_stages")
    assert compared.workload.model_flops == pytest.approx(model.flops_per_token() * compared.workload.tokens)


def test_what_is_recomputed_is_the_model_s_alone():
    compared, alone = (
        step_work(workload_of(form("preferences", f"preference.loss_type={loss}", "recompute_config.recompute=true")))
        for loss in ("sigmoid", "simpo")
    )
    assert [part.repeated for part in compared.parts.values()] == [part.repeated for part in alone.parts.values()]


def test_a_plan_weighs_the_reference_s_layers():
    compared, alone = (
        plan_problem(workload, DEVICE, 1024 * MIB, "run").layers[0].forward for workload in compared_with_alone()
    )
    assert compared > alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["preferences_over_stages", "preferences_without_reference_over_stages", "unpaired_answers_over_stages"]
)
def test_a_compiled_stage_computes_and_sends_as_much(name):
    """Of the last stage to the operation: on the first one MindSpore computes once what both models have alike, products of the
    embedding, and makes no gradients of what nothing trains."""
    config = form(name)
    rank = config.parallel_config.stage_device_num
    graph, compiled = compile_rank(config, rank), Counter()
    for node in (node for function in graph.functions for node in function.nodes):
        if node.op in ("MatMul", "BatchMatMul"):
            compiled["backward" if node.backward else "forward"] += cost(graph, node).products
        elif node.op == "Send":
            compiled["sent"] = bytes_of(node.tensors)
    work, predicted = step_work(workload_of(config)), Counter()
    for part, count in work.places[1].items():
        predicted["forward"] += products(work.parts[part].forward) * count
        predicted["backward"] += products(work.parts[part].backward) * count
    predicted["sent"] = work.sent.bytes / work.workload.strategy.sequence_ranks
    assert predicted == compiled
