"""A proof as a whole: its order, what is kept, what is interrupted, and what becomes of pieces that cannot be done."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import made_proofs
import pytest
from small_cluster import cluster_run

from mindllm.config import load_config, override_config
from mindllm.errors import RunFailed, UserError
from mindllm.jobs.memory import ADVICE
from mindllm.jobs.pool import Outcome, Pool
from mindllm.parallel.refusals import CompileFailed
from mindllm.prove import run_pieces as subject
from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.expected import configuration
from mindllm.prove.found import find_proof, hash_of, read_proof, remember
from mindllm.prove.pieces import OF_NO_GRAPH, PIECES, Options, Piece
from mindllm.prove.proof import Proof, Verdict, check_allowed
from mindllm.prove.prove import prove_run
from mindllm.prove.questions import QUESTIONS
from mindllm.prove.remedy import formula_remedy
from mindllm.prove.run_pieces import answer_questions, run_pieces
from mindllm.timing.device import DEFAULT, read_device
from mindllm.timing.prediction import predict
from mindllm.timing.shipped import DEVICES
from mindllm.units import GIB

KEPT = {question for piece in PIECES if piece.neutral is not None for question in piece.questions}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def executor(done, standing=Standing.PROVED, interrupted_at=None):
    """Return an executor that says ``standing`` of all questions, and notes pieces in ``done``."""

    def do(config, pieces, options, told):
        for piece in pieces:
            if piece.name == interrupted_at:
                raise KeyboardInterrupt
            done.append(piece.name)
            yield piece, tuple(Answer(name, standing, f"{name} says so") for name in piece.questions)

    return do


def proved(config, **options):
    return prove_run(config, Options(), **options)


def test_all_questions_are_answered_and_formulas_come_first():
    said = []
    proof = proved(cluster_run(dp=2), executor=executor([]), answered=said.append)
    assert [answer.question for answer in proof.answers] == list(QUESTIONS)
    assert proof.verdict is Verdict.READY
    assert proof.complete
    first = [(answer.question, answer.standing) for answer in said[:4]]
    assert first[0] == ("configuration", Standing.PROVED)
    assert {standing for _, standing in first[1:]} == {Standing.EXPECTED}
    assert {answer.question for answer in said} == set(QUESTIONS)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_what_trains_nothing_is_proved_as_what_would_train_it(mode):
    says = configuration(override_config(cluster_run(dp=2), {"run_mode": mode})).says
    told = "run_mode eval trains nothing: this is the step that would train its network"
    assert says.endswith("on 2 devices" if mode == "train" else f"on 2 devices; {told}")


@pytest.mark.parametrize(("device", "open_ones"), [(None, ["memory", "step_time"]), ("here", ["memory"])])
def test_a_run_on_a_cpu_is_ready_without_what_is_about_devices(device, open_ones, tmp_path):
    if device:
        device = tmp_path / "here.yaml"
        text = (DEVICES / "atlas_800t_a2.yaml").read_text()
        device.write_text(re.sub("^software: .*", "software: cpu", text, flags=re.MULTILINE))

    def do(config, pieces, options, told):
        for piece in pieces:
            standing = Standing.NOT_PROVED if {*piece.questions} & {*open_ones} else Standing.PROVED
            yield piece, tuple(Answer(name, standing, f"{name} says so") for name in piece.questions)

    run = override_config(cluster_run(dp=2), {"context.device_target": "CPU"})
    proof = prove_run(run, Options(device=str(device) if device else ""), executor=do)
    assert (proof.verdict, list(proof.allowed)) == (Verdict.READY, open_ones)
    assert proof.headline().endswith(f"ready: without a proof of {', '.join(open_ones)}")
    on_devices = override_config(run, {"context.device_target": "Ascend"})
    assert prove_run(on_devices, Options(), executor=do).verdict is Verdict.NOT_PROVED
    refuted = prove_run(run, Options(), executor=executor([], Standing.REFUTED))
    assert refuted.verdict is Verdict.REFUTED


@pytest.mark.parametrize("refuting", ["ranks", "graphs", ""])
def test_a_question_of_two_pieces_is_answered_once_and_stands_as_the_worse_part(refuting):
    """Which of them ends first is chance; the parts come in the order of the pieces."""

    def do(config, pieces, options, told):
        for piece in reversed(pieces):
            standing = Standing.REFUTED if piece.name == refuting else Standing.PROVED
            reasons = (Finding(f"by {piece.name}"),) * (standing is Standing.REFUTED)
            yield piece, tuple(Answer(name, standing, f"by {piece.name}", reasons) for name in piece.questions)

    said = []
    proof = proved(cluster_run(dp=2), executor=do, answered=said.append)
    (answer,) = [one for one in said if one.question == "conformance" and one.standing is not Standing.EXPECTED]
    assert answer == next(one for one in proof.answers if one.question == "conformance")
    assert answer.standing is (Standing.REFUTED if refuting else Standing.PROVED)
    assert answer.says == (f"by {refuting}" if refuting else "by ranks; by graphs")
    assert [finding.message for finding in answer.findings] == [f"by {refuting}"] * bool(refuting)


def test_a_quick_proof_proves_the_configuration_alone():
    proof = proved(cluster_run(dp=2), quick=True, executor=executor([], Standing.REFUTED))
    assert not proof.complete
    assert proof.verdict is Verdict.NOT_PROVED
    assert [answer.question for answer in proof.answers if answer.standing is Standing.PROVED] == ["configuration"]


@pytest.mark.parametrize(
    ("standing", "allowed", "verdict"),
    [
        (Standing.REFUTED, tuple(QUESTIONS), Verdict.REFUTED),
        (Standing.NOT_PROVED, (), Verdict.NOT_PROVED),
        (Standing.NOT_PROVED, tuple(QUESTIONS), Verdict.READY),
    ],
)
def test_what_may_stay_open_is_not_what_may_be_wrong(standing, allowed, verdict):
    assert proved(cluster_run(dp=2), allowed=allowed, executor=executor([], standing)).verdict is verdict


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("58GB", "fits 45.6 of 55.1 GB (limit 58 GB, 5% reserved) by formula"),
        ("40GB", "does not fit, 45.6 of 38.0 GB (limit 40 GB, 5% reserved) by formula"),
    ],
)
def test_what_fits_by_formula_alone_says_so(limit, said):
    """A quick proof is ready where everything may stay open: its memory is expected, not proved."""
    config = load_config("configs/llama2/pretrain_llama2_7b_8p.yaml", {"context.max_device_memory": limit})
    proof = proved(config, allowed=tuple(QUESTIONS), quick=True)
    assert f": ready: {said}, 16 s a step expected, without a proof of" in proof.headline()


def test_a_quick_proof_of_a_run_that_does_not_fit_ends_with_the_remedy():
    """The keys that it names make the run fit, by formula."""
    keys = {
        "recompute_config.recompute": False,
        "recompute_config.select_recompute": False,
        "runner_config.batch_size": 2,
    }
    config = load_config("configs/llama2/pretrain_llama2_13b_16p.yaml", keys)
    proof = proved(config, quick=True)
    *_, headline, last = map(str, proof.parts())
    assert headline.startswith("run: not proved: memory, ")
    found = re.match(r"does not fit by formula: stage (\d) needs ([\d.]+) GB of 55\.1 GB; set ([\w.]+): (\w+) \(", last)
    assert found
    figures = proof.answer("memory").figures
    assert float(found[2]) == pytest.approx(figures["stages"][int(found[1])]["peak"] / GIB, abs=0.06)
    (finding,) = proof.answer("memory").findings
    assert finding.key == "context.max_device_memory"
    cured = proved(override_config(config, {found[3]: json.loads(found[4])}), quick=True)
    assert cured.answer("memory").figures["fits"]
    assert "does not fit" not in str([*cured.parts()][-1])


def test_where_no_key_is_enough_more_devices_are_named():
    keys = {"context.max_device_memory": "4GB", "runner_config.batch_size": 4}
    config = load_config("configs/llama2/pretrain_llama2_13b_16p.yaml", keys)
    device = read_device(DEFAULT)
    small = device.model_copy(update={"memory_size": device.memory_size.model_copy(update={"value": 4.0 * GIB})})
    said = formula_remedy(config, small, predict(config, small).memory)
    assert said.startswith("more devices are needed: mindllm search --devices N; ")
    assert "is not enough" in said


def test_a_proof_that_memory_refutes_ends_with_the_remedy():
    finding = Finding("stage 3 needs 60.10 GB of 58.00 GB", "recompute_config.recompute: [0, 0, 0, 2]")
    memory = Answer("memory", Standing.REFUTED, "too much", (finding,), figures={"peak": 61 * GIB, "limit": 58 * GIB})
    last = str([*made_proofs.proof({"memory": memory}).parts()][-1])
    assert last == f"does not fit in the dry run: {finding.message}; {finding.advice}"


def test_the_step_in_mindformers_is_that_of_a_quick_proof():
    """The processes that do the work read the resolved run, which has no keys of MindFormers."""
    config = load_config(Path(__file__).parents[2] / "examples/mindformers/qwen3_32b_4_layers.yaml")

    def do(config, pieces, options, told):
        for piece in pieces:
            figures = {"seconds": 1.0, "seconds_in_mindformers": None}
            yield piece, tuple(Answer(name, Standing.PROVED, "said", figures=figures) for name in piece.questions)

    quick, whole = proved(config, quick=True), proved(config, executor=do)
    seconds = quick.answer("step_time").figures["seconds_in_mindformers"]
    assert seconds > 0
    assert whole.answer("step_time").figures["seconds_in_mindformers"] == seconds
    kept = proved(config, executor=do)  # answered by what the other proof found
    assert kept.answer("step_time").figures["seconds_in_mindformers"] == seconds


def test_nothing_is_proved_twice_and_a_change_is_proved_again():
    config, done = cluster_run(dp=2), []
    proved(config, executor=executor(done))
    assert done == [piece.name for piece in PIECES]
    done.clear()
    again = proved(config, executor=executor(done))
    assert done == [piece.name for piece in PIECES if piece.neutral is None]
    assert {answer.question for answer in again.answers if answer.proved_on} == KEPT
    done.clear()
    other_data = override_config(config, {"train_dataset.data_loader.config.data_path": "elsewhere"})
    proved(other_data, executor=executor(done))
    assert done == [piece.name for piece in PIECES if piece.neutral is None]
    done.clear()
    proved(override_config(config, {"runner_config.batch_size": 4}), executor=executor(done))
    assert done == [piece.name for piece in PIECES]
    done.clear()
    proved(config, executor=executor(done), use_kept=False)
    assert done == [piece.name for piece in PIECES]


def test_a_described_device_that_changes_is_timed_again(tmp_path):
    config, file = cluster_run(dp=2), tmp_path / "mine.yaml"
    text = (DEVICES / "atlas_800t_a2.yaml").read_text()
    file.write_text(text)
    before = {piece.name: piece.key(config, Options(str(file))) for piece in PIECES}
    file.write_text(re.sub(r"(memory_size:\s*\{?\s*value: )\S+?(?=[,\s}])", r"\g<1>1.0e+9", text))
    changed = {name for name, key in before.items() if key != _piece(name).key(config, Options(str(file)))}
    assert changed == {"step time", "graphs"}


def _piece(name):
    return next(piece for piece in PIECES if piece.name == name)


def test_sizes_and_room_of_a_kept_answer_are_those_of_today(monkeypatch, tmp_path):
    config = cluster_run(dp=2)
    proved(config, executor=executor([]))
    there = tmp_path / "other"
    answer = proved(override_config(config, {"output_dir": str(there)}), executor=executor([])).answer("checkpoints")
    assert answer.proved_on
    assert str(there) in answer.evidence[0]
    assert answer.figures["checkpoint"] > 0
    assert answer.says.endswith("checkpoints says so")


@pytest.mark.parametrize("standing", [Standing.REFUTED, Standing.NOT_PROVED])
def test_what_is_not_proved_is_not_kept(standing):
    done: list[str] = []
    proved(cluster_run(dp=2), executor=executor([], standing))
    proved(cluster_run(dp=2), executor=executor(done))
    assert done == [piece.name for piece in PIECES]


def test_a_key_that_the_pieces_leave_out_is_a_key():
    tree = cluster_run(dp=2).model_dump(by_alias=True, mode="json", warnings=False)
    for key in (key for key in OF_NO_GRAPH if key != "require_proof"):
        node = tree
        for part in key.split("."):
            assert part in node, key
            node = node[part]


def test_an_interrupted_proof_keeps_what_is_known():
    done: list[str] = []
    proof = proved(cluster_run(dp=2), executor=executor(done, interrupted_at="ranks"))
    assert not proof.complete
    assert proof.answer("memory").standing is Standing.PROVED
    assert proof.answer("parity").standing is Standing.NOT_PROVED
    done.clear()
    proved(cluster_run(dp=2), executor=executor(done))
    assert "stages" not in done


def test_a_proof_goes_into_json_and_back(tmp_path):
    proof = proved(cluster_run(dp=2), executor=executor([]))
    tree = json.loads(json.dumps(proof.to_dict(), allow_nan=False))
    assert Proof.of_tree(tree).to_dict() == proof.to_dict()
    path = tmp_path / "proof.json"
    path.write_text(json.dumps(tree))
    assert read_proof(path).to_dict() == proof.to_dict()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 99}', "[" * 100_000])
def test_a_file_that_is_no_proof_is_refused(tmp_path, text):
    path = tmp_path / "proof.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"proof\.json"):
        read_proof(path)


def test_a_proof_is_found_by_the_configuration_alone(tmp_path):
    config = cluster_run(dp=2)
    assert find_proof(config) is None
    proof = proved(config, executor=executor([]))
    remember(proof)
    found = find_proof(override_config(config, {"output_dir": str(tmp_path), "overwrite": True}))
    assert found is not None
    assert found.run.hash == hash_of(config)
    assert find_proof(override_config(config, {"runner_config.batch_size": 4})) is None


def test_an_unknown_question_may_not_stay_open():
    with pytest.raises(UserError, match="did you mean 'memory'"):
        check_allowed(["memry"])


@pytest.mark.parametrize(
    ("error", "standings"),
    [
        (CompileFailed("no"), [Standing.REFUTED, *[Standing.NOT_PROVED] * 2]),
        (UserError("no"), [Standing.NOT_PROVED] * 3),
        (RunFailed("no"), [Standing.NOT_PROVED] * 3),
    ],
)
def test_what_keeps_a_piece_from_being_done_is_its_answer(monkeypatch, error, standings):
    def fail(config, options, progress):
        raise error

    piece = next(piece for piece in PIECES if piece.name == "ranks")
    monkeypatch.setattr(Piece, "work", lambda self: fail)
    answers = answer_questions(piece, cluster_run(dp=2), Options())
    assert [answer.standing for answer in answers] == standings
    assert [answer.question for answer in answers] == list(piece.questions)
    assert all(answer.findings for answer in answers)


def by_name(*names):
    return [next(piece for piece in PIECES if piece.name == name) for name in names]


def test_pieces_are_done_in_processes_of_their_own(tmp_path):
    config = override_config(cluster_run(dp=2), {"output_dir": str(tmp_path / "out")})
    told = []
    pieces = by_name("data", "start")
    found = dict(run_pieces(config, pieces, Options(), lambda *words: told.append(words)))
    assert set(found) == set(pieces)
    standings = {answer.question: answer.standing for answers in found.values() for answer in answers}
    assert standings == {
        "data": Standing.NOT_PROVED,
        "start": Standing.PROVED,
    }


def test_a_process_that_ends_without_answers_leaves_the_others(tmp_path):
    broken = replace(PIECES[0], name="nonsense")
    found = dict(run_pieces(cluster_run(dp=2), [broken, *by_name("start")], Options(), lambda *words: None))
    (lost,) = found[broken]
    assert lost.standing is Standing.NOT_PROVED
    assert "exit code 1" in lost.says
    assert found[by_name("start")[0]][0].standing is Standing.PROVED


def test_a_piece_that_lacks_memory_next_to_others_runs_again_alone(monkeypatch, tmp_path):
    """The first time both pieces run together, and one lacks memory; the second time it is alone."""
    runs: list[str] = []

    class TwoAtATime(Pool):
        def __init__(self, slots, **options):
            super().__init__(2)

        def poll(self):
            tasks, self._waiting = self._waiting, []
            for task in tasks:
                runs.append(task.name)
                lacks_memory = task.name == "ranks" and len(tasks) > 1
                piece = next(piece for piece in PIECES if piece.name == task.name)
                reason = (Finding(f"too little: {ADVICE}"),) if lacks_memory else ()
                answers = [Answer(name, Standing.PROVED, "", reason).tree() for name in piece.questions]
                task.output.write_text(json.dumps(answers))
            return [Outcome(task, 0, alone=len(tasks) == 1) for task in tasks]

    monkeypatch.setattr(subject, "Pool", TwoAtATime)
    found = dict(run_pieces(cluster_run(dp=2), by_name("stages", "ranks"), Options(), lambda *words: None))
    assert runs == ["stages", "ranks", "ranks"]
    assert not any(answer.findings for answers in found.values() for answer in answers)
