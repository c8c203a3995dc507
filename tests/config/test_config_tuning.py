"""Section ``pet_config``: published trainable counts, what is named where, and mistakes told before anything is built."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mindllm.architecture.optimizer_state import further_state, state_shapes
from mindllm.architecture.tuners import is_trained
from mindllm.config import ModelConfig, keys_for_layers, load_config, render_config
from mindllm.config import model as architecture
from mindllm.errors import UserError
from mindllm.families import with_file_names
from mindllm.families.family import Family

CONFIGS = Path(__file__).parents[2] / "configs"
QWEN, LLAMA3 = "qwen/pretrain_qwen_7b.yaml", "llama3/pretrain_llama3_8b.yaml"
# Printed by ms-swift's benchmark and by unsloth; Qwen's query, key and value are one matrix, with one first matrix beside it.
COUNTS = [
    (QWEN, {"lora_rank": 2, "target_modules": "[c_attn]"}, 1_048_576),
    (QWEN, {"lora_rank": 8, "target_modules": "[c_attn]"}, 4_194_304),
    (QWEN, {"lora_rank": 64, "target_modules": "[c_attn]"}, 33_554_432),
    (QWEN, {"lora_rank": 8}, 17_891_328),
    (QWEN, {"lora_rank": 8, "use_rslora": "true"}, 17_891_328),
    (QWEN, {"lora_rank": 8, "use_dora": "true"}, 19_251_200),
    (QWEN, {"pet_type": "full"}, 7_721_324_544),
    (QWEN, {"pet_type": "galore"}, 7_721_324_544),
    (QWEN, {"pet_type": "lisa"}, 7_721_324_544),
    (QWEN, {"pet_type": "adalora"}, 26_838_912),
    (QWEN, {"pet_type": "bottleneck", "target_modules": "[feed_forward]"}, 33_689_600),
    (QWEN, {"pet_type": "llamapro", "num_new_blocks": 4}, 809_582_592),
    (LLAMA3, {"lora_rank": 8, "target_modules": "[q_proj, k_proj, v_proj]"}, 4_718_592),
    (LLAMA3, {"lora_rank": 8, "target_modules": "'.*wq|.*wk|.*wv'"}, 4_718_592),
    ("qwen1_5/pretrain_qwen1_5_7b.yaml", {"lora_rank": 8}, 19_988_480),
    ("llama2/pretrain_llama2_7b.yaml", {"lora_rank": 8}, 19_988_480),
]


PET = "--model.model_config.pet_config={{pet_type: {}}}"
ALONE = (
    "--use_parallel=false",
    "--parallel_config.data_parallel=1",
    "--parallel_config.pipeline_stage=1",
    "--parallel_config.micro_batch_num=1",
    "--parallel.enable_parallel_optimizer=false",
    "--runner_config.train_steps=100",
)


def load(name, *options, **keys):
    text = ", ".join(f"{key}: {value}" for key, value in keys.items())
    alone = ALONE if keys.get("pet_type") in ("adalora", "galore", "lisa", "llamapro") and not options else ()
    return load_config(CONFIGS / name, [*alone, *options, f"--model.model_config.pet_config={{{text}}}"]).model.config


@pytest.mark.parametrize(("name", "keys", "count"), COUNTS)
def test_published_numbers_of_trained_parameters(name, keys, count):
    model = load(name, **keys)
    assert model.architecture.trained_parameter_count() == count
    base = model.base.parameter_count()
    assert model.parameter_count() == (base if keys.get("pet_type") in ("full", "galore", "lisa") else base + count)


def test_an_architecture_follows_from_the_keys_without_asking_families(monkeypatch):
    model = load(QWEN, lora_rank=8, target_modules="[c_attn]")
    calls = []
    monkeypatch.setattr(Family, "differs", lambda *_: calls.append("a family is asked"))
    monkeypatch.setattr(architecture, "_tuned_architecture", architecture._tuned_architecture.__wrapped__)
    adapted = {adapter.module for layer in model.architecture.layers for adapter in layer.adapters}
    copied = model.base.model_copy(update={"pet_config": model.pet_config})
    assert (adapted, calls) == ({"attention.wq", "attention.wk", "attention.wv"}, [])
    assert copied.architecture == model.architecture


@pytest.mark.parametrize("word", ["all-linear", "[all-linear]", "all"])
def test_all_projections_by_the_words_of_others(word):
    assert load(QWEN, target_modules=word).pet_config == load(QWEN, target_modules="ALL").pet_config


def test_what_is_written_back_has_the_same_adapters(tmp_path):
    run = load_config(CONFIGS / QWEN, [*ALONE, "--model.model_config.pet_config={target_modules: [c_attn]}"])
    (tmp_path / "run.yaml").write_text(render_config(run))
    again = load_config(tmp_path / "run.yaml")
    assert again == run
    assert again.model.config.pet_config.target_modules == ("c_attn",)
    assert again.model.config.architecture == run.model.config.architecture


def test_a_model_made_by_hand_is_told_to_look_names_up():
    made = ModelConfig.model_validate(load(QWEN, lora_rank=8).model_dump())
    with pytest.raises(RuntimeError, match="with_file_names"):
        made.architecture  # noqa: B018
    assert with_file_names(made).architecture == load(QWEN, lora_rank=8).architecture


def test_a_frozen_weight_costs_no_gradient():
    plain, lora = load_config(CONFIGS / QWEN).model.config, load(QWEN, lora_rank=8)
    matrices = plain.parameter_count() - plain.vocab_size * plain.hidden_size
    assert lora.flops_per_token() == pytest.approx(plain.flops_per_token() - 2 * matrices + 6 * 17_891_328, rel=1e-3)


def test_modules_to_save_are_trained_whole():
    model = load(QWEN, modules_to_save="[norm_out, lm_head]", target_modules="[wq]")
    trained = model.architecture.trained_shapes()
    assert {"lm_head.weight", "model.norm_out.weight"} <= {*trained}
    assert {name.split(".")[-1] for name in trained} == {"weight", "lora_a", "lora_b"}


def test_patterns_freeze_and_keep_the_rest():
    model = load(QWEN, pet_type="full", freeze_include="['*tok_embeddings*', 'model.layers.[01].*']")
    trained = model.architecture.trained_shapes()
    assert "model.layers.2.attention.wq.weight" in trained
    assert not any(name.startswith(("model.tok", "model.layers.0.", "model.layers.1.")) for name in trained)
    only = load(QWEN, pet_type="full", freeze_exclude="['lm_head*']").architecture.trained_shapes()
    assert [*only] == ["lm_head.weight"]


def test_new_layers_stand_behind_the_groups_they_are_copied_from():
    model = load(QWEN, pet_type="llamapro", num_new_blocks=4)
    trained = {int(name.split(".")[2]) for name in model.architecture.trained_shapes()}
    assert trained == {8, 17, 26, 35}
    assert model.layer_count == model.merged.num_layers == 36
    assert model.merged.architecture.weight_shapes() == model.architecture.weight_shapes()
    plain, tuned = model.base.architecture, model.architecture
    assert tuned.flops_per_token(64) > plain.flops_per_token(64) * 2 / 3


def test_new_layers_stay_trained_when_a_model_is_cut_to_a_few():
    model = load(QWEN, pet_type="llamapro", num_new_blocks=4)
    few = model.architecture.specifications()
    smaller = type(model).model_validate({**model.model_dump(exclude_unset=True), **keys_for_layers(model, few)})
    assert smaller.architecture.layers == few
    assert {name.split(".")[2] for name in smaller.architecture.trained_shapes()} == {"1"}


def test_layers_that_are_frozen_are_of_another_kind_and_stay_so_when_they_are_few():
    model = load(QWEN, pet_type="full", freeze_include="['model.layers.[01].*']")
    architecture = model.architecture
    assert len(architecture.specifications()) == 2
    few = architecture.specifications()
    smaller = type(model).model_validate({**model.model_dump(exclude_unset=True), **keys_for_layers(model, few)})
    assert smaller.architecture.layers == few
    assert not is_trained(smaller.architecture.pet, "model.layers.0.attention.wq.weight")
    assert is_trained(smaller.architecture.pet, "model.layers.1.attention.wq.weight")


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"target_modules": "[c_atn]"}, "target_modules", "did you mean 'c_attn'"),
        ({"target_modules": "'.*nothing'"}, "target_modules", "matches no projection"),
        (
            {"target_modules": "'wq,wv'"},
            "target_modules",
            "matches no projection (value wq,wv); write a list, [wq, wv]",
        ),
        ({"target_modules": "'.*('"}, "target_modules", "invalid regular expression"),
        ({"target_modules": r"'.*layers\.1\..*wq'"}, "target_modules", "in all layers or in none"),
        ({"lora_rank": 5000}, "lora_rank", "above the width of attention.wq, 4096"),
        ({"modules_to_save": "[norm]"}, "modules_to_save", "did you mean 'norm_out'"),
        ({"freeze_include": "['*']"}, "freeze_include", "pet_type: full"),
        ({"pet_type": "full", "freeze_include": "['*']"}, "freeze_include", "nothing is left"),
        ({"pet_type": "full", "freeze_include": "['*nose*']"}, "freeze_include", "matches no weight"),
        ({"lora_dropout": 1.0}, "lora_dropout", "less than 1"),
        ({"pet_type": "llamapro", "num_new_blocks": 5}, "num_new_blocks", "write one of 1, 2, 4, 8, 16, 32"),
        ({"pet_type": "llamapro", "lora_rank": 4}, "lora_rank", "is a key of pet_type lora (pet_type here: llamapro)"),
        ({"num_new_blocks": 2}, "num_new_blocks", "is a key of pet_type llamapro (pet_type here: lora)"),
        ({"pet_type": "adalora", "adalora_target_r": 16}, "adalora_target_r", "above the rank at the start, 12"),
        ({"pet_type": "adalora", "adalora_init_r": 5000}, "adalora_init_r", "above the width of attention.wq, 4096"),
        ({"pet_type": "adalora", "target_modules": "[nothing]"}, "target_modules", "is not a projection of the model"),
        ({"pet_type": "galore", "galore_rank": 5000}, "galore_rank", "above the width of attention.wq, 4096"),
        ({"pet_type": "lisa", "lisa_activated_layers": 40}, "lisa_activated_layers", "above the 32 layers"),
        (
            {"pet_type": "bottleneck", "target_modules": "[feed_forwrd]"},
            "target_modules",
            "did you mean 'feed_forward'",
        ),
        ({"pet_type": "bottleneck", "target_modules": "[]"}, "target_modules", "attention and feed_forward"),
        ({"pet_type": "bottleneck", "target_modules": "'.*wq'"}, "target_modules", "write ALL"),
        ({"pet_type": "bottleneck", "adapter_length": 5000}, "adapter_length", "above the width of the model, 4096"),
        ({"lora_rang": 4}, "lora_rang", "did you mean 'lora_rank'"),
    ],
)
def test_mistakes_are_one_line(keys, key, words):
    with pytest.raises(UserError) as refused:
        load(QWEN, **keys)
    message = str(refused.value)
    assert key in message
    assert words in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ([*ALONE, "--runner_config.train_steps=null", "--runner_config.epochs=1"], "train_steps", "write its steps"),
        (
            [*ALONE, "--runner_config.train_steps=9", PET.format("adalora, adalora_tinit: 9")],
            "train_steps",
            "leaves no steps",
        ),
    ],
)
def test_where_ranks_are_not_allocated(options, key, words):
    with pytest.raises(UserError, match=words) as refused:
        load_config(CONFIGS / QWEN, [PET.format("adalora"), *options])
    assert f"{key}: " in str(refused.value)


@pytest.mark.parametrize("kind", ["adalora", "galore", "lisa"])
def test_every_kind_is_there_in_every_layout(kind):
    layout = ["--parallel_config.model_parallel=2", "--parallel_config.pipeline_stage=2"]
    steps = ["--runner_config.train_steps=100", "--parallel_config.micro_batch_num=2"]
    config = load_config(CONFIGS / QWEN, [PET.format(kind), *layout, *steps])
    assert config.parallel.enable_parallel_optimizer
    assert config.model.config.pet_config.pet_type == kind


@pytest.mark.parametrize("kind", ["galore", "lisa"])
def test_experts_are_not_among_projected_or_drawn_weights(kind):
    mixtral = CONFIGS / "mixtral/pretrain_mixtral_8x7b.yaml"
    with pytest.raises(UserError, match=f"experts are not trained with pet_type {kind} yet"):
        load_config(mixtral, [PET.format(kind), *ALONE, "--parallel_config.expert_parallel=1"])


def test_bottlenecks_are_not_exported():
    with pytest.raises(UserError, match="no Hugging Face model has bottlenecks"):
        load_config(CONFIGS / QWEN, [PET.format("bottleneck"), "--export_hf.directory=exported"])


def test_projected_moments_are_small():
    """GiB of optimizer state of Qwen-7B: both moments, or those of the projections with the projections."""
    sizes = {}
    for name, keys in {"full": {}, "galore": {"galore_rank": 128}}.items():
        architecture = load(QWEN, pet_type=name, **keys).architecture
        shapes = state_shapes(architecture.trained_shapes()) | further_state(architecture)
        sizes[name] = 4 * sum(map(math.prod, shapes.values())) / 2**30
    assert sizes["full"] == pytest.approx(57.5, abs=0.1)
    assert sizes["galore"] == pytest.approx(11.2, abs=0.1)
