"""Recomputation as ir_inspect explains it: what it saves, and two ways to ask for it in vain."""

import json

import pytest

from mindllm.cli.inspect import main

TOKENS, HIDDEN, WIDTH, LAYERS, TENSOR_PARALLEL = 64, 64, 96, 2, 2
HALF, SINGLE = 2, 4  # bytes
SILU, MUL, RESHAPE = r"feed_forward\.w1\.activation\.silu", r"feed_forward\.mul", r"feed_forward\.w2\.reshape"
ONE_TENSOR = TOKENS * WIDTH * HALF


@pytest.fixture
def effects(capsys):
    """Effects by pattern of what ``recompute`` is given."""

    def run(*arguments):
        main(["recompute", *map(str, arguments), "--json"])
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        return {effect["pattern"]: effect for effect in said["effects"]}, said

    return run


@pytest.mark.slow
def test_selected_operators_save_what_they_yield(kept, effects):
    found, _ = effects(kept("norms"))
    for pattern in (SILU, MUL):
        effect = found[pattern]
        assert (effect["matched"], effect["flagged"], effect["repeated"]) == (2, 2, 2)
        assert effect["saved"] == effect["yielded"] == LAYERS * ONE_TENSOR // TENSOR_PARALLEL
        assert effect["why"] == ""


def test_a_reshape_undoes_the_recomputation_before_it(feed_forward, effects):
    """Published models have it: SiLU and Mul selected, and a Reshape in the linear layer that follows."""
    found, said = effects(feed_forward(SILU, MUL))
    assert found[SILU]["saved"] == ONE_TENSOR
    assert (found[MUL]["flagged"], found[MUL]["repeated"], found[MUL]["saved"]) == (1, 0, 0)
    assert "the Reshape behind it in feed_forward.w2 is not recomputed" in found[MUL]["why"]
    assert f"'{RESHAPE}'" in found[MUL]["why"]
    assert said["saved"] == ONE_TENSOR

    found, said = effects(feed_forward(SILU, MUL, RESHAPE))  # as it advised
    assert (found[MUL]["repeated"], found[MUL]["saved"], found[MUL]["why"]) == (1, ONE_TENSOR, "")
    assert said["saved"] == 2 * ONE_TENSOR


def test_the_cast_before_a_norm_undoes_its_recomputation(runs, effects, kept):
    config, rank = runs("norms")
    found, before = effects("--config", config, "--rank", rank)
    norm = found[r".*\.norm"]
    assert (norm["flagged"], norm["repeated"]) == (4, 4)
    assert norm["saved"] < norm["yielded"] / 20  # no more than one number a token
    assert "the Cast before it in attention_norm is not recomputed: its float32 result" in norm["why"]
    assert r"select it too: 'attention_norm\.cast'" in norm["why"]

    _, after = effects(kept("norms and casts"))  # as it advised
    norms, tokens = 2 * LAYERS, TOKENS // TENSOR_PARALLEL  # sequence parallel
    assert after["saved"] - before["saved"] == norms * tokens * HIDDEN * (
        SINGLE - HALF
    )  # fp16 is kept in place of fp32


@pytest.mark.slow
def test_the_micro_batches_of_a_stage_share_what_is_repeated(kept, effects):
    """In a reused network the compiler marks operators differently; layer 2 is recomputed, of layer 3 SiLU and Mul."""
    found, said = effects(kept("pipeline"))
    assert set(found) == {"recompute", SILU, MUL}
    assert found["recompute"]["layers"] == [2]
    assert found["recompute"]["repeated"] > 30
    for pattern in (SILU, MUL):
        effect = found[pattern]
        assert (effect["layers"], effect["repeated"]) == ([3], 1)
        assert effect["saved"] == effect["yielded"] == ONE_TENSOR // TENSOR_PARALLEL
    assert said["saved"] > found["recompute"]["saved"]


def test_what_is_saved_is_what_the_same_run_keeps_without_recomputation(runs, kept, effects):
    config, rank = runs("pipeline")
    switched_off = [f"--recompute_config.{key}=false" for key in ("recompute", "select_recompute")]
    _, without = effects("--config", config, "--rank", rank, *switched_off)
    _, recomputing = effects(kept("pipeline"))
    assert recomputing["kept"] + recomputing["saved"] == without["kept"]


def test_nothing_asked_for_is_nothing_said(feed_forward, effects):
    found, said = effects(feed_forward())
    assert found == {}
    assert said["saved"] == 0
    assert said["kept"] > 0
