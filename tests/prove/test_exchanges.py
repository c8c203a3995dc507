"""Exchanges nobody asked for: refuted where they are dear, told where they are cheap, open where a step is not known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from small_cluster import cluster_run

from mindllm.compiled.inspect.redundant import LayoutChange
from mindllm.errors import UserError
from mindllm.parallel.stages import stages_of
from mindllm.prove.answers import Standing
from mindllm.prove.checks import graphs
from mindllm.prove.pieces import Options

CONFIG = cluster_run(dp=1, tp=2)


@pytest.fixture
def communication(monkeypatch):
    """Answers where one exchange of so many bytes was found, and a step takes so many seconds."""

    def answer(size, seconds):
        change = LayoutChange(
            "Add in norm",
            "MatMul in w1",
            "model.layers.0.w1",
            (1, 2),
            (1, 1),
            ("AllGather",),
            size,
            size,
            1,
            "",
            "",
            "shard w1",
        )

        def predict(config, device):
            if seconds is None:
                raise UserError("swap_config: not modelled")
            return SimpleNamespace(seconds=seconds)

        monkeypatch.setattr(graphs, "layout_changes", lambda graph: [change] if size is not None else [])
        monkeypatch.setattr(graphs, "predict", predict)
        compiled = [graphs.Compiled(stages_of(CONFIG)[0], CONFIG, None)]
        return graphs._communication(CONFIG, compiled, Options())

    return answer


@pytest.mark.parametrize(
    ("size", "seconds", "standing"),
    [
        (None, 1.0, Standing.PROVED),
        (0, 1.0, Standing.PROVED),
        (1 << 10, 1.0, Standing.PROVED),
        (1 << 34, 1.0, Standing.REFUTED),
        (1 << 34, None, Standing.NOT_PROVED),
        (None, None, Standing.PROVED),
    ],
)
def test_standing(communication, size, seconds, standing):
    assert communication(size, seconds).standing is standing


def test_what_is_dear_says_how_to_mend_it(communication):
    (finding,) = communication(1 << 34, 1.0).findings
    assert "Add in norm -> MatMul in w1" in finding.message
    assert finding.advice == "shard w1"
