"""Functions of the package say what their commands say: the same dictionary, the same tables; and errors and progress."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from dry_run_cases import FormulaSimulations, pipeline
from small_cluster import cluster_run

import mindllm
from mindllm.config import render_config
from mindllm.dry_run import simulations
from mindllm.verify import check as verify_check

PIPELINE = "configs/llama2/pretrain_llama2_70b_64p.yaml"
SMALL = "configs/llama2/pretrain_llama2_7b_8p.yaml"


def said(main, capsys, *options):
    """Return what a command prints with ``--json``."""
    capsys.readouterr()
    main([*map(str, options), "--json"])
    return json.loads(capsys.readouterr().out)


def through_json(result):
    """Return the dictionary of a result as a program reads it, and its version."""
    tree = result.to_dict()
    assert next(iter(tree)) == "schema"
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree
    assert len(repr(result)) < 100
    assert result._repr_html_().startswith(("<p>", "<table>"))
    return tree


def test_a_plan_is_that_of_the_command(capsys, tmp_path):
    from mindllm.cli.plan import main

    planned = mindllm.plan(PIPELINE, validate=False, max_memory="50GB", seconds=20)
    told = said(main, capsys, "--config", PIPELINE, "--no-validate", "--max_memory", "50GB", "--seconds", "20")
    assert through_json(planned) | {"solve_seconds": 0} == told | {"solve_seconds": 0}
    assert planned.lower_bound <= planned.objective
    assert planned.keys["recompute"] == told["recompute"]
    planned.write(tmp_path / "planned.yaml")
    assert mindllm.load_config(tmp_path / "planned.yaml") == planned.config
    assert planned.gain in str(planned)


def test_a_plan_that_cannot_be_is_an_error():
    with pytest.raises(mindllm.CheckFailed, match="no recomputation fits the memory"):
        mindllm.plan(PIPELINE, max_memory="1GB", seconds=5)
    with pytest.raises(mindllm.UserError) as refused:
        mindllm.plan("configs/llama2/pretrain_llama2_7b.yaml")
    assert refused.value.key == "parallel_config.pipeline_stage"


@pytest.mark.parametrize("size", [54, "54", "54 GB", "lots"])
def test_a_size_of_memory_has_a_unit(size):
    with pytest.raises(mindllm.UserError) as refused:
        mindllm.plan(SMALL, max_memory=size, seconds=1)
    assert (refused.value.key, refused.value.value) == ("max_memory", size)
    assert refused.value.advice == "write a size such as '58GB' or '58000MB'"


def test_one_task_is_its_name_and_a_prompt_is_needed(monkeypatch):
    asked = []
    monkeypatch.setattr("mindllm.evaluate.outcome.evaluate_run", lambda config, tasks: asked.append(tasks))
    mindllm.evaluate(SMALL, tasks="arc_easy", load_checkpoint="model")
    assert asked == [["arc_easy"]]
    with pytest.raises(mindllm.UserError, match="prompts: holds none; give at least one"):
        mindllm.generate({"base": SMALL, "processor": {"tokenizer": {"vocab_file": "t.json"}}}, [])


def test_a_search_is_that_of_the_command_and_writes_nothing(capsys, tmp_path, monkeypatch):
    from mindllm.cli.search import main

    told = []
    monkeypatch.chdir(tmp_path)
    found = mindllm.search(SMALL, best=1, seconds=20, progress=lambda *step: told.append(step))
    assert list(tmp_path.iterdir()) == []
    assert {what for what, _, _ in told} == {"predicting strategies", "planning the best"}
    assert through_json(found) == said(main, capsys, "--config", SMALL, "--best", "1", "--seconds", "20")
    assert found.config.parallel_config.device_num == 8
    assert "fits, by formula: " in found.render_page()
    again = mindllm.search(SMALL, best=1, seconds=20, output=tmp_path / "kept")
    assert (again.found.reused, mindllm.search(SMALL, best=1, output=tmp_path / "kept").found.reused) == (
        0,
        again.found.tried,
    )


def test_a_dry_run_is_that_of_the_command(capsys, tmp_path, monkeypatch):
    from mindllm.cli import dry_run as command

    monkeypatch.setattr(FormulaSimulations, "source_lines", lambda self, config: {}, raising=False)
    monkeypatch.setattr(simulations, "simulations_here", lambda workers, progress: FormulaSimulations())
    run = pipeline(2, 8, 8)
    path = tmp_path / "run.yaml"
    path.write_text(render_config(run), encoding="utf-8")
    found = mindllm.dry_run(run, stages=[0], output=tmp_path / "page")
    options = ("--config", path, "--stages", "0", "--output", tmp_path / "out")
    assert through_json(found) == said(command.main, capsys, *options)
    assert found.fits
    assert found.advice == ""
    assert sorted(file.name for file in (tmp_path / "page").iterdir()) == ["memory.html", "rank_0.log"]
    short = mindllm.dry_run(path, max_device_memory="0.5GB")
    assert not short.fits
    assert "GB more than the limit of 0.500 GB" in short.advice
    assert mindllm.dry_run(path, max_device_memory="0.5GB", advice=0).advice == ""
    with pytest.raises(mindllm.UserError, match="there is no such stage; write 0 to 1"):
        mindllm.dry_run(run, stages=[2])


def test_a_verification_is_that_of_the_command(capsys, tmp_path, monkeypatch):
    from mindllm.cli.check import main

    def answer(config, options, progress):
        progress("executing")
        times = {"compile": 1.0, "execute": 1.0, "total": float(options.steps)}
        return verify_check.Outcome(config, (), ("step 1: loss",), 2, seconds=times)

    monkeypatch.setattr(verify_check, "check", answer)
    path = tmp_path / "run.yaml"
    path.write_text(render_config(cluster_run(tp=2)), encoding="utf-8")
    told = []
    found = mindllm.verify(str(path), steps=3, progress=lambda what, done=0, total=None: told.append(what))
    assert through_json(found) == said(main, capsys, "--config", path, "--steps", "3")
    assert (found.ok, found.problems, told) == (False, ("step 1: loss",), ["executing"])
    with pytest.raises(mindllm.UserError, match="steps: must be at least 1"):
        mindllm.verify(str(path), steps=0)
    with pytest.raises(mindllm.UserError) as refused:
        mindllm.verify(cluster_run(use_parallel=False))
    assert refused.value.key == "parallel_config"


def test_an_inspection_answers_as_the_command(capsys, tmp_path):
    from mindllm.cli.inspect import main

    graph = mindllm.inspect(cluster_run(tp=2), rank=1)
    graph.save(tmp_path / "rank1.graph")
    kept = mindllm.inspect(tmp_path / "rank1.graph")
    assert through_json(kept) == said(main, capsys, "summary", tmp_path / "rank1.graph")
    questions = {"comm": kept.communication, "recompute": kept.recomputation}
    for name, ask in questions.items():
        assert through_json(ask()) == said(main, capsys, name, tmp_path / "rank1.graph")
    assert kept.redundant().to_dict() == said(main, capsys, "redundant", tmp_path / "rank1.graph")
    main(["comm", str(tmp_path / "rank1.graph")])
    assert capsys.readouterr().out == f"{kept.communication()}\n"
    assert graph.differences(kept).to_dict()["operators"] == []
    with pytest.raises(mindllm.UserError, match="no operator in"):
        kept.show("no.such.cell")


def test_a_proof_is_that_of_the_command(capsys, tmp_path, monkeypatch):
    from functools import partial

    from mindllm.cli import prove as command
    from mindllm.prove import prove as proving
    from mindllm.prove.answers import Answer, Standing
    from mindllm.prove.found import find_proof

    def executor(config, pieces, options, told):
        for piece in pieces:
            told(piece, "looking", 1, 2)
            yield piece, tuple(Answer(name, Standing.PROVED, f"{name} holds") for name in piece.questions)

    stand_in = partial(proving.prove_run, executor=executor)
    monkeypatch.setattr(proving, "prove_run", stand_in)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 40))  # others write there, too
    monkeypatch.chdir(tmp_path)
    told = []
    found = mindllm.prove(SMALL, allow=["data"], again=True, progress=lambda *step: told.append(step))
    assert ("stages: looking", 1, 2) in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    assert find_proof(mindllm.load_config(SMALL)).run.hash == found.run.hash
    once = {"seconds": 0, "run": {}}
    assert through_json(found) | once == said(command.main, capsys, SMALL, "--allow", "data", "--again") | once
    mindllm.prove(SMALL, quick=True, output=tmp_path / "quick")
    assert sorted(path.name for path in (tmp_path / "quick").iterdir()) == ["proof.json", "report.html"]
    with pytest.raises(mindllm.UserError, match="there is no such question; did you mean 'data'"):
        mindllm.prove(SMALL, allow="date")
    with pytest.raises(mindllm.UserError, match="abacus"):
        mindllm.prove(SMALL, device="abacus")
