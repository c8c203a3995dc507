"""AdamW with moments of 8 bits is the published algorithm: map, blocks, update, what is kept, and what is refused."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from mindllm import verify
from mindllm.config import load_config, override_config
from mindllm.config.optimizer import OptimizerConfig
from mindllm.errors import UserError
from mindllm.parallel.weight_cut import WeightCut
from mindllm.reduced_runs.model import reduce_model, single_device
from mindllm.train.checkpoint import CheckpointStore, load_checkpoint
from mindllm.train.engine import ReplicaEngine
from mindllm.train.optimizers.adamw_8bit import AdamW8bit, BlockCodes, cut_of_scales
from mindllm.train.optimizers.dynamic_map import decoded, dynamic_map, encoded, steps_beside
from mindllm.verify.recomputed.update import update_problems
from tests.train.test_muon import Step, batch

BLOCK = 256
NAMES = {
    "model.tok_embeddings.embedding_weight": (40, 128),  # blocks over rows
    "model.layers.0.attention.wq.weight": (16, 512),
    "model.layers.0.attention.wk.weight": (8, 64),  # too small
    "model.layers.1.norm.weight": (8192,),  # of one axis
}
CODED = (0, 1)
RATE, STEPS = 1e-2, 6
FORM = Path(verify.__file__).parent / "forms" / "moments_of_8_bits.yaml"
SHIPPED = Path(__file__).parents[2] / "configs/llama2"
ONE_LAYER = {"model.model_config.num_layers": 1, "model.model_config.seq_length": 16, "runner_config.batch_size": 1}
THIRTY_TWO = {"optimizer.state_bits": 32, "optimizer.state_block_size": 256}


def published_map(signed):
    """``create_dynamic_map`` of bitsandbytes (``functional.py``, 0.45), for 8 bits, of which seven at most are exponent."""
    found = []
    for exponent in range(7):
        items = 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1
        edges = np.linspace(0.1, 1, items)
        means = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        found += [*means, *(-means if signed else ())]
    return np.sort(np.array([*found, 0.0, 1.0], np.float32))


def nearest(shares, table):
    """The code of the nearest value of each, by all distances."""
    return np.argmin(np.abs(shares[..., None].astype(np.float64) - table), axis=-1)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(signed):
    assert dynamic_map(signed).dtype == np.float32
    np.testing.assert_array_equal(dynamic_map(signed), published_map(signed))


class Codes(nn.Cell):
    """What a step makes of a moment."""

    def __init__(self, signed):
        super().__init__(auto_prefix=False)
        self.codes = BlockCodes(signed, BLOCK)

    def construct(self, codes, scales, moment):
        largest = self.codes.scales_of(scales, moment)
        found = self.codes.encoded(codes, moment, largest)
        return found, largest, self.codes.decoded(moment, found, largest)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_ones(signed):
    """Also at the edges between decades, of blocks of zeros, and of the numbers that codes stand for."""
    random, table = np.random.default_rng(1), published_map(signed)
    spread = 10.0 ** random.uniform(-9, 0, (62, BLOCK)) * random.choice([-1, 1] if signed else [1], (62, BLOCK))
    edges = (table[1:] + table[:-1]) / 2
    near = np.resize(np.concatenate([edges * (1 + 1e-4), edges * (1 - 1e-4)]), (2, BLOCK))
    moment = np.concatenate([spread, near, table[None], np.zeros((1, BLOCK))]).astype(np.float32)
    moment[:, 0] = np.where(moment.any(axis=1), 1.0, 0.0)  # so a block is its shares
    moment *= 10.0 ** random.uniform(-20, 3, (66, 1)).astype(np.float32)
    given = Tensor(np.zeros((33, 2 * BLOCK), np.uint8)), Tensor(np.zeros((33, 2), np.float32))
    found, scales, values = (item.asnumpy() for item in Codes(signed)(*given, Tensor(moment.reshape(33, -1))))
    np.testing.assert_array_equal(scales.ravel(), np.abs(moment).max(axis=1))
    shares = moment / np.where(scales.reshape(-1, 1), scales.reshape(-1, 1), 1)
    wanted = nearest(shares, table)
    ties = np.abs(np.abs(shares - table[found.reshape(-1, BLOCK)]) - np.abs(shares - table[wanted])) < 1e-7 * np.abs(
        shares
    )
    assert np.all((found.reshape(-1, BLOCK) == wanted) | ties)
    assert np.mean(found.reshape(-1, BLOCK) == wanted) > 0.999
    own, own_scales = encoded(moment.reshape(33, -1), signed, BLOCK)
    np.testing.assert_array_equal(own_scales, scales.ravel())
    assert np.max(np.abs(own.astype(int) - found)) <= 1
    np.testing.assert_allclose(values, decoded(found, scales, signed), rtol=1e-6)
    room = steps_beside(found, scales, signed)
    assert np.all(np.abs(values.reshape(66, -1) - moment) <= room.reshape(66, -1))


def adamw_of_8_bits(weight, gradients, config):
    """Dettmers et al., 2022, in float64, with bitsandbytes' order: the update takes moments before they are rounded."""
    beta1, beta2 = config.betas
    tables = published_map(True), published_map(False)
    kept = [np.zeros_like(weight), np.zeros_like(weight)]
    for step, gradient in enumerate(gradients, 1):
        moments = beta1 * kept[0] + (1 - beta1) * gradient, beta2 * kept[1] + (1 - beta2) * gradient**2
        left = [1 - beta**step for beta in config.betas]
        weight = weight * (1 - RATE * config.weight_decay)
        weight = weight - RATE * moments[0] / left[0] / (np.sqrt(moments[1] / left[1]) + config.eps)
        kept = []
        for moment, table in zip(moments, tables, strict=True):
            blocks = moment.reshape(-1, BLOCK)
            scales = np.abs(blocks).max(axis=1, keepdims=True)
            kept.append((table[nearest(blocks / scales, table)] * scales).reshape(weight.shape))
    return weight, kept


def test_steps_are_those_of_the_paper():
    config = OptimizerConfig(state_bits=8)
    random = np.random.default_rng(0)
    initial = [random.standard_normal(shape).astype(np.float32) for shape in NAMES.values()]
    gradients = [[random.standard_normal(shape).astype(np.float32) for shape in NAMES.values()] for _ in range(STEPS)]
    weights = [Parameter(Tensor(value), name=name) for name, value in zip(NAMES, initial, strict=True)]
    optimizer = AdamW8bit(weights, config)
    step = Step(optimizer)
    for values in gradients:
        step(Tensor(RATE, ms.float32), *map(Tensor, values))
    state = {item.name: item.asnumpy() for item in optimizer.get_parameters()}
    for place, name in enumerate(NAMES):
        assert (f"adam_m_codes.{name}" in state) == (place in CODED) != (f"adam_m.{name}" in state)
    for place in CODED:
        name = weights[place].name
        wanted, moments = adamw_of_8_bits(initial[place].astype(np.float64), [one[place] for one in gradients], config)
        off = np.abs(weights[place].asnumpy() - wanted)
        assert np.mean(off > 1e-5) < 1e-3  # a number in the middle of two codes may have either
        for kind, moment, signed in zip("mv", moments, (True, False), strict=True):
            codes, scales = (state[f"adam_{kind}_{part}.{name}"] for part in ("codes", "scales"))
            assert (codes.dtype, codes.shape, scales.size * BLOCK) == (np.uint8, moment.shape, moment.size)
            room = 1e-6 * np.abs(moment).max() + steps_beside(codes, scales, signed)
            assert np.all(np.abs(decoded(codes, scales, signed) - moment) <= room)
            assert np.mean(np.abs(decoded(codes, scales, signed) - moment) > 1e-5 * np.abs(moment)) < 1e-2


def small(**changes):
    """The form's model on one device, in fp32."""
    keys = {"model.model_config.compute_dtype": "float32", **changes}
    return override_config(single_device(load_config(FORM)), keys)


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path):
    config = small(**ONE_LAYER)
    engine = ReplicaEngine(config)
    engine.step(batch(0, config), 1e-2, 1.0)
    path = CheckpointStore(tmp_path, keep_checkpoint_max=1).save(1, engine.local_state(), {"step": 1})
    losses = [engine.step(batch(seed, config), 1e-2, 1.0).loss for seed in (1, 2)]
    resumed = ReplicaEngine(config)
    resumed.load(load_checkpoint(path))
    assert [resumed.step(batch(seed, config), 1e-2, 1.0).loss for seed in (1, 2)] == losses
    states = (
        {name: np.asarray(part) for name, part in one.local_state()[0].optimizer.items()} for one in (engine, resumed)
    )
    first, second = states
    assert {name: item.dtype for name, item in first.items() if "codes" in name}.popitem()[1] == np.uint8
    for name, item in first.items():
        np.testing.assert_array_equal(item, second[name])
    with pytest.raises(UserError, match=r"moments have 8 bits.*; write 8"):
        ReplicaEngine(small(**ONE_LAYER, **THIRTY_TWO)).load(load_checkpoint(path))


def test_a_small_model_learns_as_with_moments_of_32_bits():
    """A hundred steps on sequences that repeat: losses fall to a fifth, and end within a twentieth of AdamW's."""
    losses = []
    for bits in (8, 32):
        config = small(**ONE_LAYER, **THIRTY_TWO | {"optimizer.state_bits": bits})
        engine = ReplicaEngine(config)
        tokens = [batch(seed, config) for seed in range(4)]
        losses.append([engine.step(tokens[step % 4], 3e-3, 1.0).loss for step in range(100)])
    coded, whole = np.array(losses)
    assert whole[-4:].mean() < whole[:4].mean() / 5
    assert 0 < np.max(np.abs(coded - whole)) < 0.05 * whole[0]
    assert coded[-20:].mean() == pytest.approx(whole[-20:].mean(), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer.type": "Muon"}, "is a key of type AdamW"),
        ({"optimizer.state_bits": 32}, "is a key of state_bits: 8"),
        ({"model.model_config.expert_num": 4}, "have moments of 32 bits"),
        ({"model.model_config.pet_config": {"pet_type": "lisa"}}, "pet_type: full"),
        (
            {"monitor_config.monitor_on": True, "monitor_config.update_ratio_format": "log"},
            "optimizer.state_bits 8 updates otherwise",
        ),
    ],
)
def test_what_has_no_moments_of_8_bits_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        small(**changes)


def test_blocks_that_would_lie_on_several_devices_are_refused_with_what_to_write():
    with pytest.raises(UserError, match=r"32 columns of .*wo.weight.*; write optimizer.state_block_size: 32"):
        load_config(FORM, ["--optimizer.state_block_size=256"])
    by_rows, by_columns = WeightCut((64, 96), 0, 2, 4, 8), WeightCut((64, 96), 1, 2, 2, 4)
    assert cut_of_scales("w", by_rows, 64, error).part_shape == (12,)  # over rows of 96 numbers
    assert cut_of_scales("w", by_rows, 32, error).part_shape == (8, 3)
    assert cut_of_scales("w", by_columns, 16, error).part_shape == (32, 3)
    for cut, block, key in ((by_rows, 512, "enable_parallel_optimizer"), (by_columns, 32, "model_parallel")):
        with pytest.raises(UserError, match=f"{key}: .*do not hold whole blocks of {block}"):
            cut_of_scales("w", cut, block, error)


def test_small_models_of_a_check_hold_whole_blocks():
    config = load_config(SHIPPED / "pretrain_llama2_70b_64p.yaml", ["--optimizer.state_bits=8"])
    small_run = reduce_model(config)
    assert small_run.optimizer.block == 16
    assert small_run.model.config.intermediate_size // small_run.parallel_config.model_parallel % 16 == 0


def error(key, problem):
    return UserError(f"{key}: {problem}")


@pytest.mark.parametrize("planted", ["codes", "scales", "weight", None])
def test_the_check_recomputes_codes_and_weights(planted):
    """One step in numpy; what is wrong with it afterwards is seen."""
    config = small()
    name = "lm_head.weight"
    random = np.random.default_rng(3)
    weight, gradient = random.standard_normal((2, 128, 64))
    before = {name: weight, **coded_state(name, 0.1 * gradient, 0.1 * gradient**2)}
    old = [
        decoded(before[f"adam_{kind}_codes.{name}"], before[f"adam_{kind}_scales.{name}"], kind == "m") for kind in "mv"
    ]
    moments = [
        beta * one + (1 - beta) * new
        for beta, one, new in zip(config.optimizer.betas, old, (gradient, gradient**2), strict=True)
    ]
    left = [1 - beta**2 for beta in config.optimizer.betas]
    step = moments[0] / left[0] / (np.sqrt(moments[1] / left[1]) + config.optimizer.eps)
    after = {name: weight - RATE * (step + config.optimizer.weight_decay * weight), **coded_state(name, *moments)}
    if planted == "weight":
        after[name] = after[name] + 1e-5
    elif planted:
        after[f"adam_v_{planted}.{name}"] = after[f"adam_v_{planted}.{name}"] + np.array(
            2 if planted == "codes" else 1e-2, after[f"adam_v_{planted}.{name}"].dtype
        )
    norm = float(np.linalg.norm(gradient))
    config = override_config(config, {"runner_wrapper.use_clip_grad": False})
    found = list(update_problems(config, 2, lambda _: RATE, norm, before, after, applied={name: gradient}))
    assert bool(found) == bool(planted)
    assert all(("AdamW's update" if planted == "weight" else "adam_v_codes") in problem for problem in found)


def coded_state(name, first, second):
    pairs = (encoded(moment, signed, 16) for moment, signed in ((first, True), (second, False)))
    return {
        f"adam_{kind}_{part}.{name}": array
        for kind, pair in zip("mv", pairs, strict=True)
        for part, array in zip(("codes", "scales"), pair, strict=True)
    }
