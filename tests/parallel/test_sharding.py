"""The sharding table covers every operator of every form of the model, once, with layouts the mesh can hold."""

import itertools

import mindspore as ms
import pytest
from small_cluster import cluster_run

from mindllm.models import CausalLM, Kernels
from mindllm.parallel.layout import Mesh
from mindllm.parallel.operators import operators
from mindllm.parallel.sharding import FOLLOWERS, Sharding, apply_sharding, sharding_table

WITHOUT_ENTRY = {"Cast", "Reshape"}


def kernels(fused, flash):
    return Kernels(fused=fused, flash_attention=flash, activation=ms.float16, operand=ms.float16)


def form(fused=True, flash=True, **changes):
    """Model, table and configuration of one form of the decoder."""
    keys = ("qkv_has_bias", "attn_proj_has_bias", "tie_word_embeddings", "loss_chunks")
    model = {key: changes.pop(key) for key in keys if key in changes}
    config = cluster_run(dp=2, tp=2, model=model, **changes)
    chosen = kernels(fused, flash)
    lm = CausalLM(config.model.config, chosen)
    return lm, sharding_table(lm, config.parallel_config), config


@pytest.mark.parametrize(("fused", "flash"), list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize(
    "options", [{"qkv_has_bias": True}, {"qkv_has_bias": True, "attn_proj_has_bias": True}, {"loss_chunks": 4}]
)
def test_every_operator_has_one_entry(fused, flash, options):
    model, table, _ = form(fused, flash, **options)
    assert set(table) == {path for path, op in operators(model).items() if op.name not in WITHOUT_ENTRY}
    assert FOLLOWERS == WITHOUT_ENTRY


@pytest.mark.parametrize("options", [{}, {"use_seq_parallel": True}, {"vocab_emb_dp": False}, {"loss_chunks": 2}])
@pytest.mark.parametrize("mesh", [Mesh(2, 2), Mesh(1, 2), Mesh(2, 1), Mesh(4, 4)])
def test_all_of_it_applies(options, mesh):
    model, table, _ = form(tie_word_embeddings=True, **options)
    apply_sharding(model, table, mesh)
    sharded = [op for op in operators(model).values() if op.name not in WITHOUT_ENTRY]
    assert all("in_strategy" in op.attrs for op in sharded)


def test_strategies_of_a_layer_under_sequence_parallelism():
    model, table, _ = form(use_seq_parallel=True)
    apply_sharding(model, table, Mesh(2, 4))
    layer = model.model.layers[1]
    assert layer.attention_norm.norm.attrs["in_strategy"] == ((8, 1), (1,))
    assert layer.attention.wq.matmul.attrs["in_strategy"] == ((2, 1), (4, 1))
    assert layer.attention.wo.matmul.attrs["in_strategy"] == ((2, 4), (1, 4))
    assert layer.attention.wo.matmul.attrs["out_strategy"] == ((8, 1),)
    assert layer.attention.attention.flash_attention.attrs["in_strategy"][0] == (2, 4, 1, 1)


def test_an_entry_that_matches_nothing_is_an_error():
    model, table, _ = form()
    table["model.layers.0.attention.wz.matmul"] = Sharding((("dp", None), ("tp", None)))
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.attention\.wz\.matmul' matches no operator"):
        apply_sharding(model, table, Mesh(2, 2))


def test_an_operator_without_an_entry_is_an_error():
    model, table, _ = form()
    model.model.layers[0].extra = ms.ops.Tanh()
    with pytest.raises(ValueError, match=r"0 entries for operator 'model\.layers\.0\.extra'"):
        apply_sharding(model, table, Mesh(2, 2))


def test_a_layout_the_mesh_cannot_hold_names_the_operator():
    model, table, _ = form()
    table["lm_head.matmul"] = Sharding(((None, None), ("tp", None)))
    with pytest.raises(ValueError, match=r"sharding of 'lm_head\.matmul': copies along 'dp'"):
        apply_sharding(model, table, Mesh(2, 2))


def test_tables_and_masks_are_left_out_of_the_sharded_optimizer():
    model, table, _ = form()
    apply_sharding(model, table, Mesh(2, 2))
    assert {p.name: p.parallel_optimizer for p in model.get_parameters() if p.parallel_optimizer is False} == {
        p.name: False for p in model.get_parameters() if not p.requires_grad
    }
