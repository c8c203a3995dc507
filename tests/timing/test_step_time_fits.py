"""A predicted step, and a strategy that is called best, of a run that does not fit or that nobody can believe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mindllm.cli import search as tune
from mindllm.cli.time import main
from mindllm.config import load_config
from mindllm.errors import CheckFailed
from mindllm.strategies.outcome import recommended
from mindllm.strategies.search import evaluate_current
from mindllm.timing.configured import workload_of
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.memory import stage_bytes
from mindllm.timing.verdict import RESERVED, Room, implausible, memory_limit
from mindllm.units import GIB

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "configs/llama2/pretrain_llama2_13b_16p.yaml")
TINY = str(ROOT / "configs/llama2/pretrain_llama2_tiny.yaml")
DEVICE = read_device(DEFAULT)


@pytest.fixture
def small(tmp_path):
    """A run of 8 layers that recomputes nothing, and GB that its fullest stage lacks a tenth of."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"base: {RUN}\nmodel:\n  model_config:\n    num_layers: 8\n    offset: 0\n"
        "recompute_config:\n  recompute: false\n  select_recompute: false\n",
        encoding="utf-8",
    )
    needed = max(stage_bytes(workload_of(load_config(path)))) / GIB
    return str(path), f"--context.max_device_memory={0.9 * needed:.2f}GB"


def test_a_run_that_does_not_fit_says_by_how_much(capsys, small):
    config, limit = small
    stages = Room(stage_bytes(workload_of(load_config(config))), memory_limit(load_config(config, [limit]), DEVICE))
    assert main(["--config", config, limit]) == 0
    text = capsys.readouterr().out
    assert f"does not fit: it needs {max(stages.stages) / GIB:.1f} GB on stage 0, " in text
    usable = f"{stages.usable / GIB:.1f} GB (limit {stages.limit / GIB:.4g} GB, 5% reserved)"
    assert f"{stages.missing / GIB:.1f} GB more than {usable}, by formula" in text
    assert main(["--config", config, limit, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["memory_limit"]) == (False, stages.limit)
    usable = found["memory_limit"] * (1 - found["memory_reserved"])
    assert found["memory_missing"] == max(stage["memory"] for stage in found["stages"]) - usable
    with pytest.raises(CheckFailed, match=r"the run needs .* more than .* 5% reserved"):
        main(["--config", config, limit, "--must_fit"])


def test_a_run_that_fits_says_nothing(capsys, small):
    assert main(["--config", small[0], "--must_fit"]) == 0
    text = capsys.readouterr().out
    assert "fit" not in text
    assert "limit 58.00 GB, 5% reserved: 55.10 GB" in text
    assert main(["--config", small[0], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["memory_missing"], found["implausible"]) == (True, 0.0, "")


def test_a_run_takes_no_more_than_the_device_has():
    config = load_config(RUN, ["--context.max_device_memory=70GB"])
    assert memory_limit(config, DEVICE) == DEVICE.memory_size.value == 64 * GIB


@pytest.mark.parametrize(
    ("utilisation", "told"), [(0.0016, "0.16% is less"), (0.02, ""), (0.55, ""), (1.0, ""), (6.35, "635% is more")]
)
def test_utilisation_that_no_run_has_is_named(utilisation, told):
    assert told in implausible(utilisation)
    assert bool(told) == bool(implausible(utilisation))


def test_an_implausible_step_names_what_it_is_spent_on(capsys):
    assert main(["--config", TINY]) == 0
    text = capsys.readouterr().out
    assert "implausible: model FLOPs utilisation of" in text
    assert "% of it is bubble and rest" in text


def test_a_yaml_that_does_not_fit_is_not_called_best(capsys, tmp_path, small):
    config, limit = small
    options = ["--config", config, limit, "--best", "2", "--seconds", "2", "--output", str(tmp_path)]
    assert tune.main([*options, "--apply", str(tmp_path / "tuned.yaml")]) == 0
    text = capsys.readouterr().out
    assert "that is the best here" not in text
    assert "the YAML as it is does not fit: it needs" in text
    assert "best of those that fit: " in text
    assert "does not fit: it needs" in (tmp_path / "strategies.html").read_text(encoding="utf-8")
    written = load_config(tmp_path / "tuned.yaml")
    assert Room(stage_bytes(workload_of(written)), memory_limit(written, DEVICE)).fits
    assert tune.main([*options, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["yaml"]["fits"], answer["best"][0]["fits"], answer["recommended"]) == (False, True, "best 1")
    assert answer["yaml"]["memory_missing"] > 0


def test_the_fastest_that_fits_is_recommended(small):
    hand = evaluate_current(load_config(small[0]), DEVICE)
    slower = evaluate_current(load_config(small[0], ["--recompute_config.recompute=true"]), DEVICE)
    needed = max(hand.memory) / (1 - RESERVED)
    assert recommended([slower], hand, needed) is hand
    assert recommended([slower], hand, 0.99 * needed) is slower
    assert recommended([hand], slower, needed) is hand
    assert recommended([replace(hand)], hand, needed) is hand
    assert recommended([slower], None, needed) is slower
