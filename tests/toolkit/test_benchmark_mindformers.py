"""The benchmark beside MindFormers: its YAMLs, which mindllm reads as they are, and its tables."""

import json

import pytest
import yaml

from mindllm.config import load_config
from mindllm.errors import RunFailed, UserError
from toolkit.benchmark import mindformers

ROW = {
    "case": "all recomputed, O0",
    "operators": 9,
    "collectives": 3,
    "compile_seconds": 1.6,
    "host_mb": 900,
    "weights_mb": 12,
}


@pytest.mark.parametrize("case", mindformers.CASES)
def test_a_case_is_one_run_for_both(tmp_path, case):
    tree = mindformers.changed(mindformers.CASES[case])
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = load_config(path)
    assert config.parallel_config.device_num == 8
    assert not config.parallel_config.vocab_emb_dp
    assert config.context.memory_optimize_level == case[-2:]
    assert config.recompute_config.recompute == ("nothing" not in case)
    assert config.parallel_config.expert_parallel == (2 if "MoE" in case or "DeepSeek" in case else 1)


def test_pages_are_written_from_what_the_tool_says(tmp_path, monkeypatch):
    peaks = iter((1000, 2000, 900, 2100))

    def run(command, variables, directory):
        if "offline" not in command:
            return ""
        found = {**ROW, "actual_peak_mb": 2500, "kept": str(directory)}
        ranks = [{"stage": stage, "used_peak_mb": next(peaks), **found} for stage in (0, 1)]
        return json.dumps({"ranks": ranks})

    monkeypatch.setattr(mindformers, "_run", run)
    graph = {"layers": {"full": 2}, "exchanges": {"AllGather": 4, "Send": 1}}
    monkeypatch.setattr(mindformers, "compiled_to", lambda keep: [graph, graph])
    python, page, rows = tmp_path / "python", tmp_path / "page.md", tmp_path / "rows.json"
    python.touch()
    former = {"stage": 0, "used_peak_mb": 7000, "actual_peak_mb": 7000, **ROW, "case": "nothing recomputed, O1"}
    rows.write_text(json.dumps([{**former, "program": program} for program in (mindformers.THEIRS, mindformers.OURS)]))
    page.write_text("# Old\n\n## What differs\nWords of an author.\n")
    asked = ["--rows", str(rows), "--cases", "all recomputed, O0", "--markdown", str(page)]
    assert mindformers.main(["--python", str(python), *asked]) == 0
    assert [row["case"] for row in json.loads(rows.read_text())] == ["all recomputed, O0"] * 4 + [former["case"]] * 2
    assert "kept" not in rows.read_text()  # the path of a directory that is gone
    text = page.read_text()
    assert text.startswith("# Beside MindFormers")
    assert text.endswith("\n## What differs\nWords of an author.\n")
    assert "| nothing recomputed, O1 | 0 | 7,000 | 7,000 | +0.0% |" in text
    assert "| all recomputed, O0 | 1 | mindllm | 12 | 2 full | AllGather 4, Send 1 |" in text
    assert "| all recomputed, O0 | 0 | 1,000 | 900 | -10.0% |" in text
    assert "| all recomputed, O0 | 1 | 2,000 | 2,100 | +5.0% |" in text
    assert "| all recomputed, O0 | 0 | MindFormers 1.8 | 1,000 | 1,500 | 9 | 3 | 2 | 900 |" in text


def test_a_program_that_fails_ends_the_benchmark(tmp_path):
    with pytest.raises(RunFailed, match="ended with 4"):
        mindformers._run(["bash", "-c", "exit 4"], {}, tmp_path)


def test_no_mindformers(tmp_path):
    with pytest.raises(UserError, match=r"scripts/mindformers\.sh makes it"):
        mindformers.main(["--python", str(tmp_path / "none"), "--markdown", str(tmp_path / "page.md")])
