"""Every key of ``monitor_config`` is accounted for: figures that mindllm has are computed, others are said by name."""

import pytest

from mindllm.config import load_config
from mindllm.config.reading.load import read_file
from mindllm.errors import UserError
from mindllm.mindformers.reader import convert
from mindllm.mindformers.reading import Outcome
from tests.mindformers.mindformers_files import LEGACY, writer

SECTION = {  # all keys of MindFormers 2.1's MonitorConfig, with their defaults
    "monitor_on": False, "dump_path": "./dump", "target": None, "invert": False, "step_interval": 1,
    "local_loss_format": None, "local_norm_format": None, "device_local_norm_format": None,
    "device_local_loss_format": None, "optimizer_state_format": None, "weight_state_format": None,
    "max_attention_logit_format": None, "throughput_baseline": None, "print_struct": False,
    "check_for_global_norm": False, "global_norm_spike_threshold": 3.0, "global_norm_spike_count_threshold": 10,
    "stable_rank_config": {"format": None, "step_interval": 100}, "health_checkpoint": None,
}  # fmt: skip


@pytest.fixture
def account(tmp_path):
    """Return what becomes of a section, by the name of its keys, and the run."""

    def of(**changes):
        path = writer(tmp_path)(LEGACY, {"monitor_config": SECTION | changes})
        entries = convert(read_file(path)).entries
        told = {entry.key.removeprefix("monitor_config."): entry for entry in entries if "monitor_config" in entry.key}
        return told, path

    return of


def test_what_is_off_is_off_by_name(account):
    told, path = account()
    assert {name.partition(".")[0] for name in told} == {*SECTION}
    assert told["monitor_on"].outcome is Outcome.USED
    rest = [entry for name, entry in told.items() if name != "monitor_on"]
    assert {entry.outcome for entry in rest} == {Outcome.WITHOUT_EFFECT}
    assert all(entry.reason for entry in rest)
    assert load_config(path).monitor_config.watched() == ()


def test_figures_that_both_have_are_computed_and_no_others(account):
    told, path = account(
        monitor_on=True, step_interval=5, local_norm_format=["log"], weight_state_format="tensorboard",
        device_local_loss_format="log", optimizer_state_format=["tensorboard"], throughput_baseline=3000,
        target=["layers.0"],
    )  # fmt: skip
    monitor = load_config(path).monitor_config
    assert monitor.watched() == ("grad_norm", "param_norm")
    assert (monitor.logged(), monitor.step_interval) == (("grad_norm",), 5)
    used = {name for name, entry in told.items() if entry.outcome is Outcome.USED}
    assert used == {"monitor_on", "step_interval", "local_norm_format", "weight_state_format"}
    assert "by group of layers" in told["local_norm_format"].reason
    for name, said in {
        "device_local_loss_format": "the loss over all tokens",
        "optimizer_state_format": "update_ratio_format",
        "throughput_baseline": "tokens per second",
        "target": "figures are of all weights",
        "dump_path": "metrics.jsonl and the trackers",
        "stable_rank_config.format": "stable ranks of weights are not computed",
    }.items():
        assert told[name].outcome is Outcome.WITHOUT_EFFECT
        assert said in told[name].reason, name


def test_where_no_figure_is_ours_nothing_is_watched(account):
    told, path = account(monitor_on=True, device_local_norm_format=["log"])
    assert load_config(path).monitor_config.watched() == ()
    assert (told["monitor_on"].outcome, told["monitor_on"].becomes) == (
        Outcome.TRANSLATED,
        "monitor_config.monitor_on: false",
    )


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"print_struct": True}, "monitor_config.print_struct", "the run would end"),
        ({"check_for_global_norm": True}, "monitor_config.check_for_global_norm", "runner_wrapper.skip_spikes"),
        (
            {"health_checkpoint": {"global_norm_spike_threshold": 2.0}},
            "monitor_config.health_checkpoint.global_norm_spike_threshold",
            "no run ends at a spike",
        ),
    ],
)
def test_what_would_end_the_run_is_refused_where_it_is_on(account, changes, key, said):
    _, path = account(**changes)
    load_config(path)
    _, path = account(monitor_on=True, **changes)
    with pytest.raises(UserError) as found:
        load_config(path)
    assert (found.value.key, len(found.value.problems)) == (key, 1)
    assert said in str(found.value)


def test_a_key_that_the_section_has_not_is_unknown(account):
    _, path = account(local_norm_formt="log")
    with pytest.raises(UserError) as found:
        load_config(path)
    assert found.value.key == "monitor_config.local_norm_formt"
    assert "did you mean 'local_norm_format'?" in str(found.value)


@pytest.mark.parametrize("section", [None, {}])
def test_an_empty_section_says_nothing(tmp_path, section):
    path = writer(tmp_path)(LEGACY, {"monitor_config": section})
    assert not load_config(path).monitor_config.monitor_on
