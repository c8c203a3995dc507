"""Table, page, JSON and CSV of a search show one list of strategies."""

from __future__ import annotations

import csv
import html
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_cluster import cluster_run

from mindllm.cli.search import main
from mindllm.config import render_config
from mindllm.planning.solve import Infeasible
from mindllm.strategies.listing import AS_WRITTEN, DRY_RUN, ESTIMATED, PLANNED
from mindllm.strategies.outcome import Wanted, differences, find_strategies, shown_gain
from mindllm.strategies.search import UNPLANNED, pareto, plan_best, search
from mindllm.timing.device import DEFAULT, read_device
from mindllm.units import GIB

DEVICE = read_device(DEFAULT)
MODEL = {
    "num_layers": 8, "hidden_size": 2048, "num_heads": 16, "n_kv_heads": 16, "intermediate_size": 5632, "seq_length": 2048,
    "vocab_size": 32000, "compute_dtype": "bfloat16",
}  # fmt: skip


def run():
    return cluster_run(
        dp=2, tp=2, pp=2, micro=8, model=MODEL, runner_config={"batch_size": 1}, context={"max_device_memory": "16GB"}
    )


@pytest.fixture(scope="module")
def found():
    return find_strategies(run(), DEVICE, Wanted(best=2, seconds=2.0))


def points(page):
    """Name, tokens a second and device, GB and source of every point of a page."""
    titles = re.findall(r"<title>(.*?): ([\d,]+) tokens/s/device, ([\d.]+) GB, (.*?)</title>", page)
    return {(html.unescape(name), speed, size, source) for name, speed, size, source in titles}


def test_the_list_has_every_strategy_once_and_the_yaml_as_it_is(found):
    strategies = [one.candidate for one in found.entries if one.source != AS_WRITTEN]
    assert len(set(strategies)) == len(strategies) == len(found.found.judged)
    assert [one.source for one in found.entries].count(AS_WRITTEN) == 1
    assert {one.source for one in found.entries} == {PLANNED, ESTIMATED, AS_WRITTEN}
    speeds = [one.speed for one in found.entries if one.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert all(
        one.seconds * one.speed == pytest.approx(found.entries[0].seconds * found.entries[0].speed)
        for one in found.entries
    )


def test_no_estimate_is_ahead_of_the_recommended_strategy(found):
    first = next(one for one in found.entries if one.source != AS_WRITTEN)
    assert (first.source, first.candidate) == (PLANNED, found.best[0].candidate)


def test_the_front_contains_the_yaml_or_has_a_strategy_that_is_better_in_both(found):
    front = pareto([one for one in found.entries if one.fits])
    hand = next(one for one in found.entries if one.source == AS_WRITTEN)
    assert any(one.speed >= hand.speed and one.peak <= hand.peak for one in front)


def test_page_json_csv_and_table_have_the_same_figures(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(render_config(run()))
    options = [
        "--config",
        str(tmp_path / "run.yaml"),
        "--best",
        "2",
        "--seconds",
        "2",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main([*options, "--json", "--csv", str(tmp_path / "all.csv")]) == 0
    tree = json.loads(capsys.readouterr().out)
    entries = tree["candidates"]
    expected = {
        (one["name"], f"{one['tokens_per_second_per_device']:,.0f}", f"{max(one['memory']) / 2**30:.1f}", one["source"])
        for one in entries
    }
    page = (tmp_path / "out" / "strategies.html").read_text()
    assert points(page) == expected
    with (tmp_path / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["strategy"], float(row["step_s"]), row["source"]) for row in rows] == [
        (one["name"], one["seconds"], one["source"]) for one in entries
    ]
    assert rows[0]["data_parallel"] == str(entries[0]["strategy"]["data_parallel"])
    planned = [one for one in entries if one["source"] == PLANNED]
    assert [(one["seconds"], one["memory"]) for one in tree["best"]] == [
        (one["seconds"], one["memory"]) for one in planned[:2]
    ]
    (hand,) = [one for one in entries if one["source"] == AS_WRITTEN]
    assert hand["seconds"] == tree["yaml"]["seconds"]
    shown = found_table(str(find_strategies(run(), DEVICE, Wanted(best=2, seconds=2.0))))
    assert shown[:1] == [(f"{planned[0]['seconds']:.2f}", f"{planned[0]['tokens_per_second_per_device']:,.0f}")]
    assert shown[-1] == (f"{hand['seconds']:.2f}", f"{hand['tokens_per_second_per_device']:,.0f}")


def found_table(text):
    """Seconds and tokens of the rows of the printed table."""
    return re.findall(r"^(?:\d+|YAML)\s+dp.*?\s([\d.]+)\s+([\d,]+)\s+[\d ]+(?:yes|no)", text, re.MULTILINE)


def test_percentages_and_differences_are_those_of_the_figures_that_are_shown(found):
    best, hand = found.best[0], found.hand
    shown = [int(f"{one.step.tokens_per_device:.0f}") for one in (best, hand)]
    assert shown_gain(best, hand) == shown[0] / shown[1] - 1
    assert f"best: {100 * (shown[0] / shown[1] - 1):.1f}% above the YAML" in str(found)
    for _, new, former, gained in differences(best.step, hand.step).rows:
        assert float(str(gained)) == pytest.approx(float(str(former)) - float(str(new)))


def test_a_strategy_that_the_dry_run_refutes_is_not_on_the_list(found, monkeypatch):
    """The first does not fit in the dry run, the second does; the others keep the memory of the formula."""
    first, second = (one.candidate for one in found.best)

    def hold(config, best, *arguments):
        return [replace(one, simulated=True) for one in best if one.candidate == second]

    monkeypatch.setattr("mindllm.strategies.confirm.validate_by_dry_run", hold)
    monkeypatch.setattr("mindllm.strategies.confirm.simulated", lambda hand, progress: replace(hand, simulated=True))
    held = find_strategies(run(), DEVICE, Wanted(best=2, seconds=2.0, dry_run=2))
    assert [one.candidate for one in held.best] == [second]
    listed = {one.candidate: one for one in held.entries if one.source != AS_WRITTEN}
    assert first not in listed
    assert (listed[second].source, listed[second].memory_source) == (PLANNED, DRY_RUN)
    assert held.found.excluded["does not fit in the dry run"] == 1


def test_planning_goes_on_while_an_estimate_is_ahead_of_all_plans(monkeypatch):
    config = run()
    judged = search(config, 8, 16, DEVICE, 16 * GIB).judged
    tried = []

    def plan(config, candidate, *arguments):
        tried.append(candidate)
        if len(tried) == 1:
            raise Infeasible("nothing fits")
        slower = len(tried) == 2
        step = SimpleNamespace(tokens_per_device=1.0 if slower else 1e9, seconds=2.0 if slower else 1.0)
        return SimpleNamespace(candidate=candidate, step=step)

    monkeypatch.setattr("mindllm.strategies.search.plan_candidate", plan)
    refused = {}
    planned = plan_best(config, judged, DEVICE, 16 * GIB, 1, 1.0, on_refusal=refused.__setitem__)
    assert [one.step.seconds for one in planned] == [1.0, 2.0]
    assert tried == [one.candidate for one in judged[:3]]
    assert refused == {judged[0].candidate: UNPLANNED}
