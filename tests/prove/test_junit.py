"""JUnit XML of proofs, as a CI reads it: counts, outcomes, texts that XML has no place for."""

from xml.etree import ElementTree

import pytest

from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.junit import write_junit
from mindllm.prove.questions import DATA, MEMORY, PARITY, QUESTIONS, STEP_TIME
from tests.prove.made_proofs import SHORTAGE, proof


def written(path, *proofs):
    """Return the tree of what is written about proofs."""
    write_junit(proofs, path / "proofs.xml")
    return ElementTree.parse(path / "proofs.xml").getroot()


def case(root, question):
    """Return the test case of a question."""
    return root.find(f".//testcase[@name='{QUESTIONS[question].text}']")


def test_a_suite_for_each_run_and_a_case_for_each_question(tmp_path):
    root = written(tmp_path, proof(), proof(name="other.yaml"))
    assert [suite.get("name") for suite in root] == ["runs/a run.yaml", "other.yaml"]
    for suite in root:
        assert [item.get("name") for item in suite.iter("testcase")] == [item.text for item in QUESTIONS.values()]
        assert {item.get("classname") for item in suite.iter("testcase")} == {suite.get("name")}
        assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
            *("10", "0", "0", "0"),
        )
        assert (suite.get("time"), suite.get("timestamp")) == ("61.500", "2026-11-20T14:03:05+00:00")
    assert (root.get("tests"), root.get("time")) == ("20", "123.000")


@pytest.mark.parametrize(
    ("standing", "allowed", "kind"),
    [
        (Standing.REFUTED, (), "failure"),
        (Standing.REFUTED, (MEMORY,), "failure"),
        (Standing.NOT_PROVED, (), "error"),
        (Standing.NOT_PROVED, (MEMORY,), "skipped"),
        (Standing.EXPECTED, (), "skipped"),
    ],
)
def test_a_standing_is_an_outcome(tmp_path, standing, allowed, kind):
    answer = Answer(MEMORY, standing, "0.009 GB are missing", (SHORTAGE,))
    root = written(tmp_path, proof({MEMORY: answer}, allowed=allowed))
    (found,) = case(root, MEMORY)
    assert (found.tag, found.get("message")) == (kind, "0.009 GB are missing")
    if kind != "skipped":
        place = "runs/a run.yaml:7: context.max_device_memory"
        assert (found.get("type"), found.text) == (MEMORY, f"{place}: stage 0 needs 0.009 GB more; lower batch_size")
    counted = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    for node in (root, root[0]):
        assert {name: node.get(name) for name in counted.values()} == {
            name: str(int(name == counted[kind])) for name in counted.values()
        }


def test_a_question_without_findings_says_what_it_knows(tmp_path):
    root = written(tmp_path, proof({PARITY: Standing.NOT_PROVED}))
    assert case(root, PARITY).find("error").text == "parity says so"


def test_evidence_of_what_is_proved_is_output(tmp_path):
    answer = Answer(DATA, Standing.PROVED, "it will do", evidence=("64 samples looked at",))
    assert (
        case(written(tmp_path, proof({DATA: answer})), DATA).find("system-out").text
        == "it will do\n64 samples looked at"
    )


def test_programs_find_hash_and_figures_as_properties(tmp_path):
    found = {item.get("name"): item.get("value") for item in written(tmp_path, proof()).iter("property")}
    peak = f"{41.4 * 2**30:.0f}"
    assert found == {"verdict": "ready", "hash": "f00d", "seconds": "61.500", "peak": peak, "step_seconds": "30.4"}
    bare = {item.get("name") for item in written(tmp_path, proof(known={})).iter("property")}
    assert bare == {"verdict", "hash", "seconds"}


def test_texts_of_users_are_escaped_and_what_xml_does_not_know_is_replaced(tmp_path):
    hostile = '<b>&"\x00\x1b[31m\ud800\ufffe]]>\U0001f600'
    finding = Finding(hostile, hostile, hostile, hostile, 1)
    changed = {
        MEMORY: Answer(MEMORY, Standing.REFUTED, hostile, (finding,)),
        STEP_TIME: Answer(STEP_TIME, Standing.PROVED, hostile),
    }
    root = written(tmp_path, proof(changed, name=hostile, known={}))
    clean = '<b>&"\ufffd\ufffd[31m\ufffd\ufffd]]>\U0001f600'
    assert root[0].get("name") == clean
    assert case(root, MEMORY)[0].get("message") == clean
    assert case(root, MEMORY)[0].text == f"{clean}:1: {clean}: {clean}; {clean}"
    assert case(root, STEP_TIME).find("system-out").text == clean
