"""``mindllm prove``: exit codes, what it writes, several runs, mistakes in YAMLs, Ctrl-C; pieces are stand-ins here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
import yaml
from run_fixtures import MINIMAL

from mindllm.cli import prove as command
from mindllm.command import INTERRUPTED, run_command
from mindllm.prove import prove as proving
from mindllm.prove.answers import Answer, Standing
from mindllm.prove.found import read_proof
from mindllm.prove.proof import Proof
from mindllm.prove.prove import prove_run
from mindllm.prove.questions import DATA, MEMORY, QUESTIONS


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)  # tables are as wide as they need
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pieces(monkeypatch):
    """Sets how questions stand, whatever the run; a standing of None is a Ctrl-C."""

    def stand(**standings):
        def executor(config, pieces, options, told):
            for piece in pieces:
                told(piece, "working", 0, None)
                found = [standings.get(name, Standing.PROVED) for name in piece.questions]
                if None in found:
                    raise KeyboardInterrupt
                yield piece, tuple(Answer(name, how, "said") for name, how in zip(piece.questions, found, strict=True))

        monkeypatch.setattr(proving, "prove_run", partial(prove_run, executor=executor))

    stand()
    return stand


def yaml_of(path, text=""):
    """Write the smallest run and return its file."""
    path.write_text(f"{text}{yaml.safe_dump(MINIMAL)}", encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path):
    return yaml_of(tmp_path / "run.yaml")


def ended(capsys, *arguments):
    """Return exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as left:
        run_command(command.main, list(map(str, arguments)))
    printed = capsys.readouterr()
    return left.value.code, printed.out, printed.err


@pytest.mark.parametrize(
    ("standings", "options", "code"),
    [
        ({}, (), 0),
        ({"memory": Standing.REFUTED}, (), 3),
        ({"memory": Standing.REFUTED}, ("--allow", "memory"), 3),
        ({"data": Standing.NOT_PROVED}, (), 1),
        ({"data": Standing.NOT_PROVED}, ("--allow", "data"), 0),
        ({"data": Standing.NOT_PROVED, "parity": Standing.REFUTED}, (), 3),
    ],
)
def test_exit_codes(pieces, run, capsys, standings, options, code):
    pieces(**standings)
    found, out, _ = ended(capsys, run, *options)
    assert found == code
    assert "\nreport: proof/report.html; data: proof/proof.json\n" in out
    assert out.splitlines()[-1].startswith(f"{run}: ")  # the verdict comes last
    assert all(question.text in out for question in QUESTIONS.values())


@pytest.mark.parametrize("spelling", ["--config {}", "--config={}"])
def test_a_run_may_be_named_as_other_verbs_have_it(run, capsys, spelling):
    assert ended(capsys, *spelling.format(run).split(), "--quick") == ended(capsys, run, "--quick")


def test_a_quick_proof_proves_nothing_but_the_configuration(run, capsys):
    quick = ("--quick", "--json", "--allow", *QUESTIONS)
    of_cpu = {answer["question"]: answer["says"] for answer in json.loads(ended(capsys, run, *quick)[1])["answers"]}
    assert of_cpu["memory"] == of_cpu["step_time"] == "not looked at"  # the formulas are about devices
    code, out, _ = ended(capsys, run, *quick, "--context.device_target=Ascend")
    tree = json.loads(out)
    assert (code, tree["complete"], tree["verdict"]) == (0, False, "ready")
    says = {answer["question"]: answer["says"] for answer in tree["answers"]}
    assert re.match(r"[\d.]+ s ± 13% a step on Atlas 800T A2", says["step_time"])
    assert ended(capsys, run, "--quick")[0] == 1
    assert not any((run.parent / "cache" / "mindllm" / "proofs").rglob("*.json"))  # it is no run's proof


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.yaml",), "missing.yaml: no such file"),
        (("run.yaml", "missing.yaml"), "missing.yaml: no such file"),
        (("run.yaml", "--seed=-1"), "must be at least 0"),
        (("run.yaml", "--allow", "date"), "--allow date: there is no such question; did you mean 'data'?"),
        (("run.yaml", "--worse-by", "2%"), "--worse-by requires --against"),
        (("run.yaml", "--worse-by", "200%", "--against", "a"), "must be a share such as 2% (value 200%)"),
        (("run.yaml", "run.yaml", "--against", "a.json"), "--against compares a single run; pass one run"),
        (("run.yaml", "--against", "missing.json"), "missing.json"),
        (("run.yaml", "--against", "run.yaml"), "run.yaml: not a proof of mindllm"),
        (("run.yaml", "--device", "abacus"), "--device abacus: neither a file nor"),
        (("run.yaml", "--junit", "."), "--junit: .: "),
    ],
)
def test_wrong_input_is_told_before_anything_is_proved(pieces, run, capsys, arguments, said):
    code, out, err = ended(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert not (run.parent / "proof" / "proof.json").exists()


def test_a_mistake_in_a_yaml_is_refuted_at_its_line(pieces, tmp_path, capsys):
    wrong = yaml_of(tmp_path / "wrong.yaml", "sed: 4\n")
    code, out, _ = ended(capsys, wrong, "--json", "--sarif", "proofs.sarif")
    answer = json.loads(out)["answers"][0]
    assert (code, answer["question"], answer["standing"]) == (3, "configuration", "refuted")
    (finding,) = answer["findings"]
    assert not any((tmp_path / "cache" / "mindllm" / "proofs").rglob("*.json"))  # it is no run's proof
    assert (finding["file"], finding["line"], finding["key"]) == (str(wrong), 1, "sed")
    assert (finding["message"], finding["advice"]) == ("unknown key", "did you mean 'seed'?")
    (result,) = [
        item
        for item in json.loads((tmp_path / "proofs.sarif").read_text())["runs"][0]["results"]
        if item["ruleId"] == "configuration"
    ]
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}


def test_a_file_that_is_no_yaml_is_refuted_at_its_line(pieces, tmp_path, capsys):
    (tmp_path / "torn.yaml").write_text("seed: 1\nmodel: [")
    code, out, _ = ended(capsys, "torn.yaml", "--json")
    (finding,) = json.loads(out)["answers"][0]["findings"]
    assert (code, finding["file"], finding["line"]) == (3, "torn.yaml", 2)


def test_several_runs_have_directories_of_their_own_and_the_worst_code(pieces, run, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    same, wrong = yaml_of(tmp_path / "other" / "run.yaml"), yaml_of(tmp_path / "wrong.yaml", "sed: 4\n")
    pieces(data=Standing.NOT_PROVED)
    files = ("--junit", "proofs.xml", "--sarif", "proofs.sarif")
    code, out, _ = ended(capsys, run, wrong, same, "--json", *files)
    assert code == 3
    assert [tree["run"]["name"] for tree in json.loads(out)] == [str(run), str(wrong), str(same)]
    made = sorted(file.relative_to(tmp_path / "proof").as_posix() for file in (tmp_path / "proof").rglob("*.json"))
    assert made == ["run/proof.json", "run_2/proof.json", "wrong/proof.json"]
    assert len(ElementTree.parse("proofs.xml").getroot()) == 3
    assert len(json.loads((tmp_path / "proofs.sarif").read_text())["runs"][0]["properties"]["verdicts"]) == 3
    assert ended(capsys, run, same)[0] == 1


def test_ctrl_c_ends_with_130_and_writes_what_is_known(pieces, run, tmp_path, capsys):
    pieces(memory=None)
    on_devices = ("--context.device_target=Ascend", "--json", "--junit", "proofs.xml")
    code, out, _ = ended(capsys, run, yaml_of(tmp_path / "b.yaml"), *on_devices)
    (tree,) = json.loads(out)  # a list, as of several runs
    stands = {answer["question"]: answer["standing"] for answer in tree["answers"]}
    assert (code, tree["complete"], stands["data"], stands["memory"]) == (INTERRUPTED, False, "proved", "expected")
    assert not read_proof(tmp_path / "proof" / "run").complete
    assert [suite.get("name") for suite in ElementTree.parse("proofs.xml").getroot()] == [str(run)]


def test_ctrl_c_before_anything_is_known_keeps_the_runs_before(pieces, run, tmp_path, capsys, monkeypatch):
    proved = proving.prove_run
    calls = []

    def second_is_interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return proved(*arguments, **options)

    monkeypatch.setattr(proving, "prove_run", second_is_interrupted)
    code, *_ = ended(capsys, run, yaml_of(tmp_path / "b.yaml"), "--junit", "proofs.xml")
    assert code == INTERRUPTED
    assert [suite.get("name") for suite in ElementTree.parse("proofs.xml").getroot()] == [str(run)]


def with_peak(proof: Proof, peak: float) -> Proof:
    """Return the proof with a fullest stage of so many bytes."""
    answers = tuple(
        replace(one, figures={"peak": peak, "limit": 2 * peak}) if one.question == MEMORY else one
        for one in proof.answers
    )
    return replace(proof, answers=answers)


@pytest.mark.parametrize(
    ("peak", "options", "code"), [(2, ("--worse-by", "2%"), 3), (2, (), 0), (1.01, ("--worse-by=2%",), 0)]
)
def test_worse_than_an_earlier_proof(pieces, run, tmp_path, capsys, monkeypatch, peak, options, code):
    ended(capsys, run, "--output", "earlier")
    earlier = with_peak(read_proof(tmp_path / "earlier"), 1 << 33)
    (tmp_path / "earlier" / "proof.json").write_text(json.dumps(earlier.to_dict()))
    proved = proving.prove_run
    monkeypatch.setattr(
        proving, "prove_run", lambda *given, **more: with_peak(proved(*given, **more), peak * (1 << 33))
    )
    found, out, _ = ended(capsys, run, "--against", "earlier/proof.json", *options)
    assert (found, "fullest stage +8.0 GB" in out) == (code, peak == 2)
    tree = json.loads(ended(capsys, run, "--against", "earlier", *options, "--json")[1])
    assert [change["what"] for change in tree["against"]["changes"]] == ["fullest stage"]


def test_an_earlier_proof_may_be_the_one_that_is_written_over(pieces, run, capsys):
    ended(capsys, run)
    pieces(**{DATA: Standing.NOT_PROVED})
    code, out, _ = ended(capsys, run, "--allow", DATA, "--against", "proof", "--worse-by", "0%")
    assert code == 0  # what may stay open may become open
    assert "no figure changed" in out
