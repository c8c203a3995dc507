"""Every slow-down that is planted in a profile is found, with its size; nothing else is."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profile_maker import KEYS, YAML, Maker, Plants

from mindllm.config import load_config
from mindllm.profiles.compare import compare
from mindllm.profiles.report import told
from mindllm.profiles.run import read_recording
from mindllm.timing.configured import workload_of
from mindllm.timing.step import step_time

NEAR = 0.1  # of a planted size
MATRICES = ("feed_forward.w1.matmul", "feed_forward.w2.matmul", "attention.wo.matmul", "lm_head.matmul")
SLOW = "feed_forward.w2.matmul"


def found(step, plants, directory, ranks=None):
    maker = Maker(step, plants)
    records, _ = read_recording(maker.write(directory, ranks))
    return maker, compare(step, records)


def causes(comparison):
    return {one.cause for one in comparison.findings if not one.consequence}


def worth(comparison, cause):
    return sum(one.worth for one in comparison.findings if one.cause == cause)


def test_nothing_planted_is_nothing_found(step, tmp_path):
    maker, comparison = found(step, Plants(), tmp_path)
    assert maker.seconds == pytest.approx(step.seconds)
    assert comparison.findings == ()
    assert comparison.measured == pytest.approx(step.seconds, rel=1e-4)
    assert abs(comparison.unexplained) < 1e-4 * step.seconds


PLANTS = {
    "kernel": Plants(kernels={SLOW: 2.0}),
    "exchange": Plants(exchanges={("AllReduce", "tp"): 3.0}),
    "exposed": Plants(hidden=0.0),
    "host": Plants(host=0.3),
    "begin": Plants(begins=0.5),
    "data": Plants(fetches=0.2),
    "unknown": Plants(unknown=0.1),
}


@pytest.mark.parametrize("cause", PLANTS)
def test_what_is_planted_is_found_with_its_size(step, tmp_path, cause):
    maker, comparison = found(step, PLANTS[cause], tmp_path, {0, 1, 4})
    assert maker.seconds > 1.02 * step.seconds, "it is worth something"
    assert causes(comparison) == {cause}
    assert worth(comparison, cause) == pytest.approx(maker.seconds - step.seconds, rel=NEAR)
    assert abs(comparison.unexplained) < 0.002 * step.seconds


def test_a_slow_kernel_is_named_with_its_shape_and_operator(step, tmp_path):
    _, comparison = found(step, PLANTS["kernel"], tmp_path)
    first = comparison.findings[0]
    assert first.what == "MatMulV3 4096,6912;6912,5120 bfloat16"
    assert SLOW in first.detail["operators"]
    assert first.detail["cells"] == ["feed_forward.w2"], "of this shape is the gradient of w1's input, too"
    slowest = first.detail["shapes"][0]
    assert slowest["median"] == pytest.approx(1.5 * slowest["roofline"], rel=0.01)


def test_a_slow_exchange_is_named_with_its_slowest_link(step, tmp_path):
    _, comparison = found(step, PLANTS["exchange"], tmp_path)
    first = comparison.findings[0]
    assert (first.what, first.where) == ("AllReduce over tp", "stage 0, 1")
    assert first.detail["measured"] == pytest.approx(3 * first.detail["predicted"], rel=0.01)
    assert first.detail["slowest_link"] == {"link": "0-2", "transport": "HCCS", "rate": 5e9, "median": 20e9}
    assert "slowest link 0-2 HCCS 5.0 GB/s, median 20.0" in told(first)


def test_host_gaps_are_told_with_the_kernels_behind_them(step, tmp_path):
    _, comparison = found(step, PLANTS["host"], tmp_path)
    assert comparison.findings[0].detail["gaps_before"] == {"RmsNorm": pytest.approx(0.3, rel=0.01)}
    assert "before RmsNorm 0.3000 s" in told(comparison.findings[0])


def test_kernels_that_take_now_longer_now_less_are_nothing_found(step, tmp_path):
    _, comparison = found(step, Plants(jitter=0.05), tmp_path)
    assert comparison.findings == ()


def test_a_slow_rank_is_named_and_what_the_others_wait_for_is_not_counted_twice(step, tmp_path):
    maker, comparison = found(step, Plants(ranks={2: 1.3}), tmp_path)
    assert causes(comparison) == {"imbalance"}
    late = next(one for one in comparison.findings if one.cause == "imbalance")
    assert (late.detail["rank"], late.where) == (2, "stage 0")
    computing = comparison.predicted.parts(0)["computing"]
    assert late.seconds == pytest.approx(0.3 * computing, rel=NEAR)
    assert late.worth == pytest.approx(maker.seconds - step.seconds, rel=NEAR)


def test_a_rank_alone_says_that_others_come_late(step, tmp_path):
    _, comparison = found(step, Plants(ranks={2: 1.3}), tmp_path, ranks={0})
    assert causes(comparison) == {"waits for ranks"}
    computing = comparison.predicted.parts(0)["computing"]
    assert comparison.findings[0].seconds == pytest.approx(0.3 * computing, rel=NEAR)


def test_a_faster_device_is_said_to_be_faster(step, tmp_path):
    maker, comparison = found(step, Plants(kernels={SLOW: 0.5}), tmp_path)
    assert causes(comparison) == {"kernel"}
    assert maker.seconds < step.seconds
    assert worth(comparison, "kernel") == pytest.approx(maker.seconds - step.seconds, rel=NEAR)


def test_several_plants_add_up_to_the_difference(step, tmp_path):
    plants = Plants(kernels={SLOW: 1.5}, exchanges={("AllReduce", "tp"): 2.0}, host=0.1, begins=0.2)
    maker, comparison = found(step, plants, tmp_path)
    assert causes(comparison) == {"kernel", "exchange", "host", "begin"}
    whole = sum(one.worth for one in comparison.findings if not one.consequence)
    assert whole == pytest.approx(maker.seconds - step.seconds, rel=NEAR)


def test_a_kernel_that_is_slow_in_some_layers_is_named_with_these_and_its_cell(step, tmp_path):
    maker, comparison = found(step, Plants(kernels={SLOW: 3.0}, layers=(1, 3)), tmp_path, {0, 4})
    assert causes(comparison) == {"kernel"}
    assert worth(comparison, "kernel") == pytest.approx(maker.seconds - step.seconds, rel=NEAR)
    assert {one.where for one in comparison.findings if not one.consequence} == {"stage 0, 1"}
    for one in comparison.findings:
        if one.cause == "kernel":
            assert one.detail["layers"] in ([1], [3]), "of the stage where it is largest"
            assert one.detail["cells"] == ["feed_forward.w2"]


def test_stages_with_other_layers_than_the_yaml_says(step, tmp_path):
    other = load_config(YAML, [*KEYS, "--model.model_config.offset=[1,-1]"])
    maker = Maker(step_time(workload_of(other), step.device))
    records, _ = read_recording(maker.write(tmp_path))
    comparison = compare(step, records)
    assert {"work"} <= causes(comparison) <= {"work", "exchange", "exposed"}, "replicas exchange other parameters"
    assert comparison.measured == pytest.approx(maker.seconds, rel=1e-4)
    bubble = next(one for one in comparison.findings if one.cause == "bubble")
    change = maker.waits - [comparison.predicted.parts(stage)["bubble"] for stage in (0, 1)]
    assert bubble.seconds == pytest.approx(max(change, key=abs), rel=NEAR)
    assert bubble.worth > 0.01 * step.seconds, "even stages would gain"
    assert abs(comparison.unexplained) < 0.01 * step.seconds


FORMS = {
    "one device": {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "micro_batch_num": 1},
    "sequence parallel": {"model_parallel": 4, "pipeline_stage": 1, "micro_batch_num": 1, "use_seq_parallel": "true"},
    "four stages": {"data_parallel": 1, "pipeline_stage": 4, "micro_batch_num": 8},
}
MORE = {
    "two chunks": ["--parallel.pipeline_config.pipeline_interleave=true", "--model.model_config.pp_interleave_num=2"],
    "recomputed": ["--recompute_config.recompute=true"],
}


@pytest.mark.parametrize("form", [*FORMS, *MORE])
def test_of_other_forms_a_kernel_is_found_and_nothing_else(step, tmp_path, form):
    keys = [f"--parallel_config.{name}={value}" for name, value in FORMS.get(form, {}).items()]
    other = step_time(workload_of(load_config(YAML, [*KEYS, *keys, *MORE.get(form, [])])), step.device)
    one_of_each = set(range(0, other.workload.strategy.device_num, other.workload.strategy.stage_device_num))
    assert found(other, Plants(), tmp_path / "as predicted", one_of_each)[1].findings == ()
    maker, comparison = found(other, Plants(kernels={SLOW: 2.0}), tmp_path / "slow", one_of_each)
    assert causes(comparison) == {"kernel"}
    assert worth(comparison, "kernel") == pytest.approx(maker.seconds - other.seconds, rel=NEAR)


def test_experts_are_exchanged_as_predicted(step, tmp_path):
    experts = step_time(workload_of(load_config("configs/mixtral/pretrain_mixtral_8x7b.yaml")), step.device)
    _, comparison = found(experts, Plants(), tmp_path, {0})
    assert comparison.findings == ()
    assert abs(comparison.unexplained) < 1e-4 * experts.seconds


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_planted_is_found_and_nothing_else(step, tmp_path_factory, data):
    chosen = data.draw(st.sets(st.sampled_from(("kernel", "exchange", "exposed", "host", "begin", "data")), max_size=4))
    plants = Plants(
        kernels={data.draw(st.sampled_from(MATRICES)): data.draw(st.floats(1.5, 4))} if "kernel" in chosen else {},
        exchanges={("AllReduce", "tp"): data.draw(st.floats(1.3, 4))} if "exchange" in chosen else {},
        host=data.draw(st.floats(0.05, 1)) if "host" in chosen else 0.0,
        hidden=0.0 if "exposed" in chosen else 1.0,
        begins=data.draw(st.floats(0.2, 2)) if "begin" in chosen else 0.0,
        fetches=data.draw(st.floats(0.05, 1)) if "data" in chosen else 0.0,
    )
    ranks = data.draw(st.sampled_from((None, {0, 4}, {3, 5, 6})))
    maker, comparison = found(step, plants, tmp_path_factory.mktemp("profile"), ranks)
    assert causes(comparison) == chosen
    whole = sum(one.worth for one in comparison.findings if not one.consequence)
    assert whole == pytest.approx(maker.seconds - step.seconds, rel=NEAR, abs=1e-3 * step.seconds)
    assert abs(comparison.unexplained) < 1e-3 * maker.seconds
    alone = {cause: worth(comparison, cause) for cause in chosen & {"begin", "data"}}
    planted = {"begin": plants.begins - maker.overhead, "data": plants.fetches}
    assert alone == pytest.approx({cause: planted[cause] for cause in alone}, rel=NEAR)
