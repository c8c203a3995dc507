"""SARIF of proofs: what code hosts ask for, and the parts of the published schema (OASIS, SARIF 2.1.0) that it uses."""

import json

from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.questions import DATA, MEMORY, PARITY, QUESTIONS, STEP_TIME
from mindllm.prove.sarif import write_sarif
from tests.prove.made_proofs import SHORTAGE, proof

KNOWN = {  # of the schema: every property of the objects that are written, and which of them are required
    "log": ({"$schema", "version", "runs"}, {"version", "runs"}),
    "run": (
        {"tool", "invocations", "originalUriBaseIds", "columnKind", "results", "properties"},
        {"tool"},
    ),
    "driver": ({"name", "version", "rules"}, {"name"}),
    "rule": ({"id", "shortDescription", "fullDescription", "help", "defaultConfiguration"}, {"id"}),
    "result": (
        {
            *("ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints", "properties"),
            "suppressions",
        },
        {"message"},
    ),
    "location": ({"physicalLocation", "logicalLocations"}, set()),
    "physical": ({"artifactLocation", "region"}, {"artifactLocation"}),
    "logical": ({"name", "fullyQualifiedName", "kind"}, set()),
}


def written(path, *proofs):
    """Return the log that is written about proofs, after its structure was looked at."""
    write_sarif(proofs, path / "proofs.sarif")
    log = json.loads((path / "proofs.sarif").read_text())
    _look_at(log)
    return log["runs"][0]


def _has(node, name):
    known, required = KNOWN[name]
    assert required <= set(node) <= known, (name, set(node))


def _look_at(log):
    _has(log, "log")
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    _has(run, "run")
    _has(run["tool"]["driver"], "driver")
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    assert all(type(item["executionSuccessful"]) is bool for item in run["invocations"])
    rules = run["tool"]["driver"]["rules"]
    for rule in rules:
        _has(rule, "rule")
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
        assert all(rule[name]["text"] for name in ("shortDescription", "fullDescription", "help"))
    for result in run["results"]:
        _has(result, "result")
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        assert all(item["kind"] in ("inSource", "external") for item in result.get("suppressions", []))
        (location,) = result["locations"]
        _has(location, "location")
        _has(location["physicalLocation"], "physical")
        assert location["physicalLocation"]["region"]["startLine"] >= 1
        for logical in location.get("logicalLocations", []):
            _has(logical, "logical")
        base = location["physicalLocation"]["artifactLocation"].get("uriBaseId")
        assert base is None or base in run["originalUriBaseIds"]


def test_every_question_is_a_rule_and_what_is_proved_is_no_result(tmp_path):
    run = written(tmp_path, proof())
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(QUESTIONS)
    assert run["results"] == []
    assert run["properties"]["verdicts"] == [{"run": "runs/a run.yaml", "verdict": "ready", "hash": "f00d"}]


def test_a_finding_stands_at_file_line_and_key(tmp_path):
    (result,) = written(tmp_path, proof({MEMORY: Answer(MEMORY, Standing.REFUTED, "too much", (SHORTAGE,))}))["results"]
    assert (result["ruleId"], result["level"]) == (MEMORY, "error")
    assert result["message"]["text"] == "context.max_device_memory: stage 0 needs 0.009 GB more; lower batch_size"
    (place,) = result["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "runs/a%20run.yaml", "uriBaseId": "SRCROOT"},
        "region": {"startLine": 7},
    }
    (key,) = place["logicalLocations"]
    assert (key["name"], key["fullyQualifiedName"]) == ("max_device_memory", "context.max_device_memory")


def test_what_is_about_no_key_stands_at_the_file_of_the_run(tmp_path):
    changed = {PARITY: Standing.NOT_PROVED, DATA: Answer(DATA, Standing.NOT_PROVED, "open", (Finding("no files"),))}
    found = written(tmp_path, proof(changed, allowed=(DATA,)))["results"]
    assert [item["message"]["text"] for item in found] == ["parity says so", "no files"]
    assert [item["level"] for item in found] == ["warning", "warning"]
    assert ["suppressions" in item for item in found] == [False, True]
    for item in found:
        assert "logicalLocations" not in item["locations"][0]
        where = item["locations"][0]["physicalLocation"]
        assert (where["artifactLocation"]["uri"], where["region"]["startLine"]) == ("runs/a%20run.yaml", 1)


def test_what_formulas_doubt_is_a_note(tmp_path):
    doubt = Answer(STEP_TIME, Standing.EXPECTED, "no formula", (Finding("not modelled"),))
    (result,) = written(tmp_path, proof({STEP_TIME: doubt, MEMORY: Standing.EXPECTED}))["results"]
    assert (result["level"], result["message"]["text"]) == ("note", "not modelled")


def test_places_are_relative_where_they_can_be(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def place(file):
        finding = Finding("wrong", file=file, line=3)
        (result,) = written(tmp_path, proof({DATA: Answer(DATA, Standing.REFUTED, "no", (finding,))}))["results"]
        return result["locations"][0]["physicalLocation"]["artifactLocation"]

    assert place(str(tmp_path / "here" / "ü.yaml")) == {"uri": "%C3%BC.yaml", "uriBaseId": "SRCROOT"}
    assert place("below/run.yaml") == {"uri": "below/run.yaml", "uriBaseId": "SRCROOT"}
    assert place(str(tmp_path / "base.yaml")) == {"uri": f"file://{tmp_path}/base.yaml"}


def test_the_same_finding_is_known_again_in_another_proof(tmp_path):
    refuted = {MEMORY: Answer(MEMORY, Standing.REFUTED, "too much", (SHORTAGE,))}
    results = written(tmp_path, proof(refuted), proof(refuted, seconds=3.0), proof(refuted, name="b.yaml"))["results"]
    marks = [item["partialFingerprints"]["mindllm/v1"] for item in results]
    assert marks[0] == marks[1] != marks[2]
