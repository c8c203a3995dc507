"""The picture of a schedule: memory as the table has it, long schedules in three stretches, a page that names all operations."""

import json

import numpy as np
import pytest

from mindllm.planning.plan import Plan, try_plan
from mindllm.planning.problem import make_problem
from mindllm.planning.reports import picture
from mindllm.planning.reports.picture import draw_schedule, picture_windows, stage_memory
from mindllm.planning.reports.schedule_page import page_data
from mindllm.planning.solve import even_split
from mindllm.schedules.operations import BACKWARD, FORWARD, NAMES, WEIGHT

KINDS = [(name, "#000000") for name in NAMES]
DOCUMENTED = {
    "stages": 4,
    "micro_batches": 16,
    "limit_mb": 50_000,
    "point_to_point": 0.2,
    "layers": [
        {
            "name": "decoder",
            "count": 32,
            "forward": 10.1,
            "parameter_mb": 900,
            "kinds": {"none": {"backward": 20.3, "activation_mb": 800}},
        }
    ],
    "head": {"forward": 1, "backward": 2, "memory_mb": 2000},
    "tail": {"forward": 8, "backward": 16, "memory_mb": 3000},
}


def even(**changes):
    return even_split(make_problem({**DOCUMENTED, **changes}, "documented"))


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.2, 0.3])
def test_memory_is_that_of_the_table_though_passes_follow_each_other(delay):
    """A forward pass begins when the backward pass before it ends, give or take a rounding: they never hold both."""
    drawn = even(point_to_point=delay)
    for stage in range(4):
        times, memory = stage_memory(drawn, stage)
        parameters = 8 * 900 + 2000 * (stage == 0) + 3000 * (stage == 3)
        assert memory.max() == pytest.approx(drawn.peak_mb[stage])
        assert memory[0] == pytest.approx(parameters)
        assert memory.max() == pytest.approx(parameters + 6400 * (4 - stage))
        assert memory[-1] == pytest.approx(parameters)
        assert (np.diff(times) >= 0).all()


def test_few_micro_batches_are_shown_whole():
    drawn = even()
    assert picture_windows(drawn.line) == [(0.0, pytest.approx(drawn.line.makespan), "")]


@pytest.mark.parametrize("chunks", [1, 2])
def test_of_many_the_start_one_period_and_the_end_are_shown(chunks, tmp_path):
    drawn = even(micro_batches=400, chunks=chunks)
    start, period, end = picture_windows(drawn.line)
    step = float(drawn.line.end.max())
    assert [start[2], period[2], end[2]] == ["start", "one period", "end"]
    assert start[0] == 0
    assert end[1] == pytest.approx(step)
    assert start[1] < period[0] < period[1] < end[0]
    each = step / 400 * (1 if chunks == 1 else 4)
    assert period[1] - period[0] == pytest.approx(each, rel=0.05)
    draw_schedule(drawn, tmp_path / "many.png")
    assert (tmp_path / "many.png").read_bytes().startswith(b"\x89PNG")


def test_a_period_is_as_long_as_the_schedule_needs_to_repeat(monkeypatch):
    """Tensors that take half a forward pass between 4 stages: their forward passes repeat after 4 micro-batches."""
    layers = [{"name": "body", "count": 4, "forward": 10, "kinds": {"none": {"backward": 20, "activation_mb": 1}}}]
    fields = {"stages": 4, "micro_batches": 200, "point_to_point": 5, "layers": layers}
    drawn = try_plan(make_problem(fields, "delays"), Plan((("none",),) * 4))
    _, period, _ = picture_windows(drawn.line)
    assert period[2] == "one period"
    first = drawn.line.start[(drawn.line.table.place == 0) & (drawn.line.table.what == FORWARD)]
    assert ((first >= period[0] - 1e-9) & (first < period[1] - 1e-9)).sum() == 4
    monkeypatch.setattr(picture, "LONGEST", 1)
    assert picture_windows(drawn.line)[1][2] == "the middle"


def test_the_page_has_every_operation_with_its_name(tmp_path):
    drawn = even(micro_batches=12, chunks=2)
    data = page_data(drawn, KINDS)
    line = drawn.line
    for stage, own in enumerate(data["stages"]):
        named = set(zip(own["what"], own["chunk"], own["micro"], strict=True))
        assert named == {(what, chunk, micro) for what in (0, 1) for chunk in (0, 1) for micro in range(12)}
        ends = [
            begun + data["times"][what][chunk][stage]
            for begun, what, chunk in zip(own["start"], own["what"], own["chunk"], strict=True)
        ]
        mine = line.table.place % 4 == stage
        assert ends == pytest.approx(line.end[mine].tolist(), abs=1e-4)
    draw_schedule(drawn, tmp_path / "schedule.html")
    text = (tmp_path / "schedule.html").read_text(encoding="utf-8")
    assert "http" not in text
    assert "{{" not in text
    begun = text.index('type="application/json">') + len('type="application/json">')
    shown = json.loads(text[begun : text.index("</script>", begun)])
    assert [name for name, _ in shown["kinds"]] == [name for name, _ in data["kinds"]]
    assert {**shown, "kinds": None} == {**data, "kinds": None}


def test_operations_of_a_v_are_named_too():
    layer = {**DOCUMENTED["layers"][0], "weight_gradient": 9}
    problem = make_problem({**DOCUMENTED, "schedule": "zero_bubble_v", "chunks": 2, "layers": [layer]}, "a V")
    drawn = even_split(problem)
    data = page_data(drawn, KINDS)
    assert data["freed"] == [BACKWARD, WEIGHT]
    assert {what for own in data["stages"] for what in own["what"]} == {0, 1, 2, 3}
