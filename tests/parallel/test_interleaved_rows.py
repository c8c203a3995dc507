"""Layers that take their tokens in parts: what is asked for, what they compute, their layouts, and what they bring to a step."""

from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindllm.config import load_config, override_config
from mindllm.config.parallel import ParallelConfig
from mindllm.errors import UserError
from mindllm.models import CausalLM, Kernels
from mindllm.models.weights import initialise, model_weights
from mindllm.parallel.build import kernels_of
from mindllm.parallel.layout import Mesh
from mindllm.parallel.marks import BLOCK, SKIP_REDISTRIBUTION, mark_row_parts
from mindllm.parallel.operators import operators
from mindllm.parallel.sharding import apply_sharding, sharding_table
from mindllm.reduced_runs.model import reduce_model, single_device
from mindllm.timing.configured import workload_of
from mindllm.timing.costs.work import Exchange
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.step import step_time
from mindllm.timing.step_work import step_work
from mindllm.timing.what_if import interleaved

FORMS = Path(__file__).parents[2] / "mindllm/verify/forms"
FORM = FORMS / "interleaved_rows.yaml"
DEVICE = read_device(DEFAULT)
KEY = "model.model_config.fine_grain_interleave"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((f"--{KEY}=3",), "MindSpore orders two parts, and no more (value 3); write 2"),
        (("--parallel_config.model_parallel=1", "--parallel_config.use_seq_parallel=false"), "tensor-parallel ranks"),
        (("--model.model_config.seq_length=33", "--parallel_config.use_seq_parallel=false"), "loads"),
        (("--model.model_config.seq_length=34", "--runner_config.batch_size=1"), "34 tokens of a micro-batch"),
        (("--micro_batch_interleave_num=2",), "already overlaps the communication of copies"),
        (("--model.model_config.hidden_dropout=0.1",), "dropout is drawn for whole sequences"),
        (("--model.model_config.expert_num=2",), "they are not taken in parts"),
    ],
)
def test_parts_that_make_no_sense_are_refused(overrides, said):
    if said == "loads":
        assert load_config(FORM, overrides).model.config.fine_grain_interleave == 2
        return
    with pytest.raises(UserError) as error:
        load_config(FORM, overrides)
    assert said in str(error.value)


def test_layers_that_end_a_stage_join_their_parts():
    config = load_config(FORMS / "interleaved_rows_over_stages.yaml")
    assert kernels_of(config).joins == {1}
    uneven = override_config(config, {"model.model_config.offset": [1, -1]})
    assert kernels_of(uneven).joins == {2}
    assert kernels_of(load_config(FORM)).joins == set()


def test_one_device_takes_its_tokens_at_once():
    assert single_device(load_config(FORM)).model.config.fine_grain_interleave == 1


def model_of(parts):
    config = load_config(FORM).model.config
    return CausalLM(config, replace(Kernels.choose(config, "CPU"), cpu=False, activation=ms.float32, row_parts=parts))


def test_parts_compute_what_all_rows_do():
    tokens = np.random.default_rng(0).integers(0, 128, (1, 33)).astype(np.int32)
    mask, hidden = np.ones((1, 32), np.float32), []
    for parts in (1, 2):
        model = model_of(parts)
        initialise(model_weights(model), seed=3)
        hidden.append(float(model(*map(Tensor, (tokens[:, :-1], tokens[:, 1:], mask)))))
    assert hidden[1] == pytest.approx(hidden[0], rel=1e-6)


def test_cuts_and_joins_have_layouts_and_marks():
    model = model_of(2)
    sizes = ParallelConfig(model_parallel=2, data_parallel=2, use_seq_parallel=True)
    apply_sharding(model, sharding_table(model, sizes), Mesh(2, 2))
    mark_row_parts(model)
    first, *_, last = model.model.layers
    assert first.attention_norm.mul.attrs["in_strategy"][0] == (4, 1)
    assert first.beside[0].slice.attrs["in_strategy"] == ((2, 1),)
    assert last.join_query.attrs["in_strategy"] == ((2, 2), (2, 2))
    assert last.join.attrs["in_strategy"] == ((2, 1), (2, 1))
    marked = {path: op.attrs[BLOCK] for path, op in operators(model).items() if BLOCK in op.attrs}
    joins = [block for path, block in marked.items() if ".join" in path]
    assert joins == [1, 2], "a number for every join, none for the last: rows are gathered there"
    assert all(SKIP_REDISTRIBUTION in op.attrs for path, op in operators(model).items() if path in marked)


WIDE = {f"model.model_config.{key}": value for key, value in {
    "hidden_size": 4096, "intermediate_size": 11008, "seq_length": 4096, "vocab_size": 32000}.items()}  # fmt: skip


def test_exchanges_of_one_part_hide_behind_products_of_the_other():
    workload = workload_of(override_config(load_config(FORM), WIDE))
    whole = replace(workload, strategy=replace(workload.strategy, row_parts=1))
    assert 0.85 < step_time(workload, DEVICE).seconds / step_time(whole, DEVICE).seconds < 1
    cut, uncut = (step_time(one, DEVICE).forward[0].exchanged["ReduceScatter"] for one in (workload, whole))
    assert cut == pytest.approx(uncut / 2, rel=0.1)


def test_parts_exchange_and_compute_as_much_as_the_whole():
    workload = workload_of(override_config(load_config(FORM), WIDE))
    whole = replace(workload, strategy=replace(workload.strategy, row_parts=1))
    for direction in ("forward", "backward"):
        sums = [
            np.sum([
                (one.bytes, 0.0) if isinstance(one, Exchange) else (0.0, one.flops)
                for part in step_work(each).parts.values() for one in getattr(part, direction)
            ], axis=0)
            for each in (workload, whole)
        ]  # fmt: skip
        np.testing.assert_allclose(*sums, rtol=1e-12)


def test_what_would_hide_exchanges_is_named():
    workload = workload_of(load_config(FORM))
    assert list(interleaved(workload)) == ["tokens at once (fine_grain_interleave 1)"]
    whole = interleaved(workload)["tokens at once (fine_grain_interleave 1)"]
    assert list(interleaved(whole)) == [
        "tokens in parts (fine_grain_interleave 2)",
        "two copies (micro_batch_interleave_num 2)",
    ]
    assert list(interleaved(workload_of(load_config(FORMS / "copies.yaml")))) == [
        "one copy (micro_batch_interleave_num 1)"
    ]
    assert interleaved(workload_of(load_config(FORMS / "experts.yaml"))).keys() <= {
        "two copies (micro_batch_interleave_num 2)"
    }


def test_a_small_model_keeps_a_layer_between_the_first_and_the_last():
    config = override_config(load_config(FORM), {"model.model_config.num_layers": 8})
    assert reduce_model(config).model.config.num_layers == 3
    assert reduce_model(override_config(config, {KEY: 1})).model.config.num_layers == 2
