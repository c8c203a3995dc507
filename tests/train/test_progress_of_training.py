"""What is slow in a training run reports progress: the first step while it compiles, held-out loss while it is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from run_fixtures import load, minimal, write  # noqa: F401 (fixtures)

from mindllm.run import training
from mindllm.terminal import console
from mindllm.terminal.render import passing
from mindllm.train.callbacks import make_callbacks
from mindllm.train.callbacks.monitors import COMPILING, FirstStep
from mindllm.train.job.execution import Execution, Executor


class Asked(Exception):
    """Ends a run where its evaluator is made."""


def test_the_first_step_reports_that_it_compiles_and_later_ones_do_not():
    calls = []
    monitor = FirstStep(lambda *call: calls.append(call))
    state = SimpleNamespace(config=SimpleNamespace(context=SimpleNamespace(compile_cache=False)))
    record = SimpleNamespace(step=1, step_time_s=1.0)
    monitor.step_begin(state)
    assert calls == [(COMPILING, 0, 1)]
    for _ in range(2):
        monitor.step_end(state, record)
        monitor.step_begin(state)
    assert calls == [(COMPILING, 0, 1), (COMPILING, 1, 1)]


def test_without_a_terminal_lines_follow_until_it_is_done(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.02)
    shown = ""
    with passing() as progress:
        progress(COMPILING, 0, 1)
        while shown.count(COMPILING) < 2:
            shown += capsys.readouterr().err
        progress(COMPILING, 1, 1)


def test_a_run_hands_its_progress_to_the_first_step_and_to_held_out_loss(load, monkeypatch, tmp_path):  # noqa: F811
    config = load(f"--output_dir={tmp_path / 'out'}", "--do_eval=true")

    def watched(*_):
        pass

    def evaluator(rows, progress):
        raise Asked(progress)

    data = SimpleNamespace(evaluator=evaluator, total_steps=4, dataset=None)
    monkeypatch.setattr(training, "RunData", lambda *_: data)
    with pytest.raises(Asked) as asked:
        training.train(config, Execution(Executor.REPLICA), watched)
    assert asked.value.args == (watched,)
    (first,) = (item for item in make_callbacks(config, None, None, progress=watched) if isinstance(item, FirstStep))
    assert first.progress is watched
