"""The sharding table covers every operator of every form of the model, once, with layouts the mesh can hold."""

import itertools

import mindspore as ms
import pytest
from small_cluster import cluster_run

from mindllm.config.tuning import PreferenceConfig
from mindllm.finetune.preference import make_losses
from mindllm.finetune.transform import tune
from mindllm.models import CausalLM, Kernels
from mindllm.models.weights import model_weights
from mindllm.parallel.build import kernels_of
from mindllm.parallel.layout import Mesh
from mindllm.parallel.operators import operators
from mindllm.parallel.sharding import FOLLOWERS, Sharding, apply_sharding, sharding_table
from mindllm.parallel.sharding.preference import pairs_table

WITHOUT_ENTRY = {"Cast", "Reshape"}


def kernels(fused, flash):
    return Kernels(fused=fused, flash_attention=flash, activation=ms.float16, operand=ms.float16)


def form(fused=True, flash=True, **changes):
    """Model, table and configuration of one form of the decoder."""
    keys = ("qkv_has_bias", "attn_proj_has_bias", "tie_word_embeddings", "loss_chunks")
    model = {**changes.pop("model", {}), **{key: changes.pop(key) for key in keys if key in changes}}
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


@pytest.mark.parametrize("flash", [True, False])
def test_heads_of_a_shared_sequence_have_layouts_that_name_axes(flash):
    """Queries stay where they are, keys are whole; between attention and attention integers say it all."""
    model, table, _ = form(flash=flash, context_parallel=2)
    apply_sharding(model, table, Mesh(2, 2, context_parallel=2))
    layer = model.model.layers[0]
    core = layer.attention.attention
    query, key = (core.flash_attention if flash else core.scores).attrs["in_layout"][:2]
    assert (query["tensor_map"], key["tensor_map"]) == ((2, 0, 1, -1), (2, 0, -1, -1))
    assert layer.attention.transpose.attrs["in_strategy"] == ((2, 2, 2, 1),)
    assert layer.attention_norm.norm.attrs["in_strategy"] == ((4, 1), (1,))


def test_slices_of_the_loss_and_balanced_halves_have_an_entry_for_every_operator():
    config = cluster_run(context_parallel=2, tp=2, context_parallel_balanced=True, model={"loss_chunks": 2})
    model = CausalLM(config.model.config, kernels_of(config))
    table = sharding_table(model, config.parallel_config)
    assert set(table) == {path for path, op in operators(model).items() if op.name not in FOLLOWERS}
    apply_sharding(model, table, Mesh(1, 2, context_parallel=2))
    core = model.model.layers[0].attention.attention
    assert core.split_query.attrs["in_layout"][0]["tensor_map"] == (2, 0, 1, -1, -1, -1)
    assert core.split_key.attrs["in_layout"][0]["tensor_map"] == (2, 0, -1, -1, -1, -1)
    assert core.join_keys.attrs["self_define_shard"]
    assert model.losses.split_hidden.attrs["in_strategy"] == ((1, 2, 1, 1),)


def test_with_heads_for_the_sequence_attention_has_some_heads_of_all_of_it():
    model, table, _ = form(context_parallel=2, context_parallel_algo="ulysses_cp", model={"n_kv_heads": 4})
    apply_sharding(model, table, Mesh(2, 2, context_parallel=2))
    layouts = model.model.layers[0].attention.attention.flash_attention.attrs["in_layout"]
    assert [layout["tensor_map"] for layout in layouts[:3]] == [(2, (0, 1), -1, -1)] * 3


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


@pytest.mark.parametrize("pet", [{}, {"use_dora": True}])
@pytest.mark.parametrize("mesh", [Mesh(1, 4), Mesh(4, 1)])
def test_adapters_are_sharded_as_their_projections(pet, mesh):
    config = cluster_run(
        dp=2, use_seq_parallel=True, model={"pet_config": {"lora_rank": 4, **pet}, "qkv_has_bias": True}
    )
    lm, chosen = CausalLM(config.model.config, kernels(True, True)), kernels(True, True)
    tune(lm, config.model.config, chosen)
    table = sharding_table(lm, config.parallel_config)
    assert set(table) == {path for path, op in operators(lm).items() if op.name not in FOLLOWERS}
    apply_sharding(lm, table, mesh)
    layer, tensor, data = lm.model.layers[0], mesh.model_parallel, mesh.data_parallel
    up, down = layer.attention.wq.adapter, layer.feed_forward.w2.adapter
    assert up.down.attrs["in_strategy"] == ((data, 1), (1, 1))
    assert up.up.attrs["in_strategy"] == ((data, 1), (tensor, 1))
    assert down.down.attrs["in_strategy"] == ((data, tensor), (1, tensor))
    assert down.down.attrs["out_strategy"] == ((data * tensor, 1),)
    assert not any(item.parallel_optimizer for item in lm.get_parameters() if not item.requires_grad)


@pytest.mark.parametrize("section", [{"code": "uint4", "act_order": True}, {"code": "nf4"}])
@pytest.mark.parametrize("mesh", [Mesh(1, 2), Mesh(2, 2)])
def test_codes_are_split_as_the_matrix_they_make(section, mesh):
    """By rows those of projections whose output is split, by groups of columns those whose input is."""
    targets = {"modules_to_not_convert": ["wo", "w2"]} if "act_order" in section else {}
    codes = {"quant_method": "gptq", "group_size": 8, **section, **targets}
    config = cluster_run(dp=2, tp=2, model={"quantization_config": codes, "pet_config": {"lora_rank": 4}})
    chosen = kernels(fused=True, flash=True)
    lm = CausalLM(config.model.config, chosen)
    tune(lm, config.model.config, chosen)
    table = sharding_table(lm, config.parallel_config)
    assert set(table) == {path for path, op in operators(lm).items() if op.name not in WITHOUT_ENTRY}
    apply_sharding(lm, table, mesh)
    layer = lm.model.layers[0]
    kept = "act_order" not in section  # what is split by columns
    for cell, parts in ((layer.attention.wq, (2, 1)), (layer.feed_forward.w1, (2, 1))):
        assert strategies(cell.held.look_up) == [(1, 1), (*parts, 1)]
        assert strategies(cell.held.multiply) == [(*parts, 1, 1)] * 2
        if cell.held.ordered:
            assert strategies(cell.held.place) == [(2, 1), (1,)]
            assert strategies(cell.held.subtract) == [(*parts, 1, 1)] * 2
    for cell in (layer.attention.wo, layer.feed_forward.w2):
        assert cell.is_quantized == kept
        if kept:
            assert strategies(cell.held.look_up) == [(1, 1), (1, 2, 1)]
            assert strategies(cell.held.multiply) == [(1, 2, 1, 1)] * 2


def strategies(operator):
    """Parts of each dimension along the innermost of the named axes, tensor parallelism."""
    return [tuple(2 if axis == 0 else 1 for axis in item["tensor_map"]) for item in operator.attrs["in_layout"]]


def test_bottlenecks_have_the_tokens_of_their_rank_and_whole_weights():
    config = cluster_run(
        dp=2, tp=2, use_seq_parallel=True, model={"pet_config": {"pet_type": "bottleneck", "adapter_length": 4}}
    )
    lm, chosen = CausalLM(config.model.config, kernels(True, True)), kernels(True, True)
    tune(lm, config.model.config, chosen)
    assert set(model_weights(lm)) == set(config.model.config.architecture.weight_shapes())
    table = sharding_table(lm, config.parallel_config)
    assert set(table) == {path for path, op in operators(lm).items() if op.name not in FOLLOWERS}
    apply_sharding(lm, table, Mesh(2, 2))
    for cell in (lm.model.layers[0].attention_adapter, lm.model.layers[1].feed_forward_adapter):
        assert cell.down.matmul.attrs["in_strategy"] == ((4, 1), (1, 1))
        assert cell.up.bias_add.attrs["in_strategy"] == ((4, 1), (1,))


def test_lengths_of_rows_have_copies_on_replicas_of_tensor_parallel_devices():
    """Sums over columns that are split are products, which the compiler completes; no other sum is over a split dimension."""
    config = cluster_run(dp=2, tp=2, model={"pet_config": {"lora_rank": 4, "use_dora": True}})
    chosen = kernels(fused=True, flash=True)
    lm = CausalLM(config.model.config, chosen)
    tune(lm, config.model.config, chosen)
    apply_sharding(lm, sharding_table(lm, config.parallel_config), Mesh(2, 2))
    of_rows, of_columns = (
        cell.adapter.lengths for cell in (lm.model.layers[0].attention.wq, lm.model.layers[0].attention.wo)
    )
    assert strategies(of_rows.square) == [(2, 1)]
    assert strategies(of_rows.sum) == [(2, 1), (1, 1)]
    assert strategies(of_rows.sum_cross) == [(2, 1)]
    assert strategies(of_columns.sum) == [(1, 2), (1, 2)]
    assert strategies(of_columns.sum_cross) == [(1, 1)]
    assert "self_define_shard" not in of_columns.sum.attrs
    assert of_rows.sum_cross.attrs["self_define_shard"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"loss_type": "hinge"},
        {"loss_type": "ipo"},
        {"loss_type": "orpo"},
        {"loss_type": "simpo"},
        {"loss_type": "kto"},
        {"loss_type": "apo_zero_unpaired"},
    ],
    ids=str,
)
def test_every_operator_of_the_loss_of_pairs_has_one_entry(options):
    cell = make_losses(PreferenceConfig.model_validate(options), 16)
    table = pairs_table(cell)
    assert set(table) == {path for path, op in operators(cell).items() if op.name not in FOLLOWERS}
    apply_sharding(cell, table, Mesh(2, 2))
    assert cell.probe.parallel_optimizer is False
