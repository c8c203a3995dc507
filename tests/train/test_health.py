"""Health figures of a step: what numpy finds by hand, wherever the step runs and however weights are cut."""

import numpy as np
import pytest
from test_engine import YAML, batch, weights

from mindllm.compiled.execute.engine import LockstepEngine
from mindllm.config import load_config
from mindllm.config.callbacks import GRADIENT, LOGIT, UPDATE, WEIGHT
from mindllm.errors import UserError
from mindllm.train.callbacks.figures import health_line
from mindllm.train.engine import ReplicaEngine
from mindllm.train.health import group_of, health_figures

ON = "--monitor_config={monitor_on: true, max_attention_logit_format: log}"
GROUPS = (
    "--grouped_lr_schedule={grouped: [{type: ConstantWarmUpLR, learning_rate: 5e-2, params: ['*feed_forward*']}]}",
)
TWO_LAYERS, COMPOSED = ("--model.model_config.num_layers=2",), ("--model.model_config.use_flash_attention=false",)
ACCUMULATED = ("--runner_config.batch_size=2", "--runner_config.gradient_accumulation_steps=2")
CLUSTER = (
    *TWO_LAYERS,
    "--use_parallel=true",
    "--context.device_target=Ascend",
    "--parallel_config.data_parallel=2",
    "--parallel.enable_parallel_optimizer=true",
    "--parallel.parallel_optimizer_config={parallel_optimizer_threshold: 0}",
    "--runner_config.batch_size=2",
)
PIPELINE = (
    "--parallel_config.pipeline_stage=2",
    "--parallel_config.micro_batch_num=2",
    "--runner_config.batch_size=1",
)
WQ = "model.layers.{}.attention.wq.weight"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(*overrides):
    with open("run.yaml", "w", encoding="utf-8") as file:
        file.write(YAML)
    return load_config("run.yaml", [ON, *overrides])


def figures(engine, result):
    return health_figures(engine.watched(), result.global_norm, True, engine.config)


def norms(tensors):
    """Norms by group, in double precision."""
    groups = {}
    for name, tensor in tensors.items():
        groups.setdefault(group_of(name), []).append(np.ravel(tensor).astype(np.float64))
    return {group: np.linalg.norm(np.concatenate(parts)) for group, parts in groups.items()}


def logits_by_hand(values, rows):
    """The largest masked logit of the first layer of the tiny model: 4 heads of 4, 2 of keys, rotary base 10000."""

    def normed(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def rotated(x):
        angle = np.arange(8)[:, None] / 10000.0 ** (np.arange(2) / 2)
        cosine, sine = np.cos(angle), np.sin(angle)
        first, second = x[..., :2], x[..., 2:]
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

    x = normed(values["model.tok_embeddings.embedding_weight"][rows]) * values["model.layers.0.attention_norm.weight"]
    query, key = (
        rotated((x @ values[f"model.layers.0.attention.{name}.weight"].T).reshape(4, 8, -1, 4).swapaxes(1, 2))
        for name in ("wq", "wk")
    )
    scores = query @ np.repeat(key, 2, 1).swapaxes(2, 3) / 2.0
    return scores[..., np.tril(np.ones((8, 8), bool))].max()


@pytest.mark.parametrize("options", [(), ACCUMULATED, GROUPS])
def test_figures_are_those_that_numpy_finds(options):
    engine, before_decay = (
        ReplicaEngine(config(*options)),
        ("--optimizer.betas=[0.0,0.0]", "--optimizer.weight_decay=0"),
    )
    bare = ReplicaEngine(
        config(*options, *before_decay, "--runner_wrapper.use_clip_grad=false", "--monitor_config=null")
    )
    for step in range(2):
        before = weights(engine)
        bare.load_state(before)
        result = engine.step(batch(step), 1e-2, 4.0, group_rates=(5e-2,) if options is GROUPS else ())
        bare.step(batch(step), 0.0, 1.0)  # its first moments are the gradients
        moments = {
            name.partition(".")[2]: value.asnumpy()
            for name, value in bare.optimizer_state.items()
            if name.startswith("adam_m.")
        }
        after, found = weights(engine), figures(engine, result)
        changes = norms({name: after[name].astype(np.float64) - before[name] for name in after})
        for group, norm in norms(after).items():
            assert found[f"{WEIGHT}/{group}"] == pytest.approx(norm, rel=1e-6)
            assert found[f"{UPDATE}/{group}"] == pytest.approx(changes[group] / norm, rel=1e-4)
            assert found[f"{GRADIENT}/{group}"] == pytest.approx(norms(moments)[group], rel=1e-4)
        largest = logits_by_hand(before, batch(step)["input_ids"])
        assert found[f"{LOGIT}/layer_0"] == pytest.approx(largest, rel=1e-4)


def test_evaluated_text_is_no_part_of_the_logits():
    plain, evaluating = (ReplicaEngine(config()) for _ in range(2))
    loud = weights(evaluating) | {WQ.format(0): 100 * weights(evaluating)[WQ.format(0)]}
    quiet = weights(evaluating)
    evaluating.load_state(loud)
    evaluating.evaluate(batch(1))
    evaluating.load_state(quiet)
    found = [figures(engine, engine.step(batch(), 1e-2, 1.0))[f"{LOGIT}/layer_0"] for engine in (plain, evaluating)]
    assert found[0] == found[1]


def test_a_step_is_no_part_of_the_logits_of_the_next():
    plain, after_loud = (ReplicaEngine(config()) for _ in range(2))
    quiet = weights(plain)
    for engine, factor in ((plain, 1), (after_loud, 100)):
        engine.load_state(quiet | {WQ.format(0): factor * quiet[WQ.format(0)]})
        engine.step(batch(1), 0.0, 1.0)
        engine.load_state(quiet)
    found = [figures(engine, engine.step(batch(), 1e-2, 1.0))[f"{LOGIT}/layer_0"] for engine in (plain, after_loud)]
    assert found[0] == found[1]


def test_a_layer_that_explodes_shows_in_its_group():
    quiet, planted = (ReplicaEngine(config(*TWO_LAYERS)) for _ in range(2))
    planted.load_state({WQ.format(1): 300 * weights(planted)[WQ.format(1)]})
    calm, found = (figures(engine, engine.step(batch(), 1e-2, 1.0)) for engine in (quiet, planted))
    for figure in (WEIGHT, LOGIT):
        ratios = {name: found[name] / calm[name] for name in calm if name.startswith(figure)}
        loudest = max(ratios, key=ratios.get)
        assert loudest in (f"{WEIGHT}/layers_1.attention", f"{LOGIT}/layer_1")
        assert ratios.pop(loudest) > 50
        assert all(ratio == pytest.approx(1.0, rel=0.05) for ratio in ratios.values())


def test_off_and_on_train_alike():
    watched, plain = ReplicaEngine(config()), ReplicaEngine(config("--monitor_config=null"))
    for step in range(2):
        results = [engine.step(batch(step), 1e-2, 1.0) for engine in (watched, plain)]
        assert results[0] == results[1]
    assert plain.watched() == {}
    for name, weight in weights(plain).items():
        np.testing.assert_array_equal(weights(watched)[name], weight, err_msg=name)


def test_a_step_that_overflows_has_no_update():
    engine = ReplicaEngine(config())
    result = engine.step(batch(), 1e-2, 3e38)
    found = health_figures(engine.watched(), result.global_norm, not result.overflow, engine.config)
    assert not [name for name in found if name.startswith(UPDATE)]
    assert not np.isfinite(found[f"{GRADIENT}/head"])
    assert found[f"{WEIGHT}/head"] > 0


@pytest.mark.parametrize("options", [CLUSTER + PIPELINE, pytest.param(CLUSTER + COMPOSED, marks=pytest.mark.slow)])
def test_ranks_know_together_what_one_device_knows(tmp_path, options):
    alone, cluster = ReplicaEngine(config(*TWO_LAYERS)), LockstepEngine(config(*options), cache=tmp_path)
    for step in range(2):
        one, all_of_them = (figures(engine, engine.step(batch(step), 1e-2, 4.0)) for engine in (alone, cluster))
        assert all_of_them == pytest.approx(one, rel=2e-5)


@pytest.mark.parametrize(
    ("weight", "size", "group"),
    [
        ("model.tok_embeddings.embedding_weight", 1, "embedding"),
        ("model.layers.11.feed_forward.experts.w1.weight", 1, "layers_11.feed_forward"),
        ("model.layers.11.attention.wq.lora_a", 4, "layers_8-11.attention"),
        ("model.layers.3.ffn_post_norm.weight", 1, "layers_3.norms"),
        ("model.norm_out.weight", 1, "head"),
        ("lm_head.weight", 1, "head"),
    ],
)
def test_a_weight_belongs_to_the_part_of_its_layers(weight, size, group):
    assert group_of(weight, size) == group


def test_the_line_of_the_log_has_the_groups_of_one_figure():
    line = health_line(GRADIENT, {"grad_norm/embedding": 0.94349, "param_norm/head": 4.0, "grad_norm/head": 12345.6})
    assert line == "{ grad_norm: embedding 0.9435, head 1.235e+04 }"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--monitor_config={monitor_on: true, local_norm_format: null, weight_state_format: null, update_ratio_format: null}",),
         "monitor_config.monitor_on: computes nothing"),
        (("--optimizer.type=Muon",), "update_ratio_format: is found from the moments of AdamW, and optimizer.type Muon"),
        (("--model.model_config.pet_config={pet_type: galore}",), "monitor_config.update_ratio_format: is found from"),
    ],
)  # fmt: skip
def test_what_a_step_cannot_give_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        config(*options)
