"""What ir_inspect says of compiled ranks: sums by module, text, exchanges and causes, layout changes, differences."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mindllm.cli.inspect import main
from mindllm.compiled.graph.cost import step_cost
from mindllm.compiled.graph.file import load
from mindllm.errors import UserError

FORMS = Path(__file__).parents[2] / "mindllm" / "verify" / "forms"
SAMPLE = Path(__file__).parents[1] / "compiled" / "samples" / "validate_2_7_0.ir"


@pytest.fixture
def answer(capsys):
    """Runs a command with --json; returns what it said."""

    def run(*arguments):
        main([*map(str, arguments), "--json"])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_the_summary_adds_up(kept, answer):
    summary = answer("summary", kept("norms"))
    modules = {row["module"]: row for row in summary["modules"]}
    graph = load(kept("norms"))
    assert summary["flops"] == step_cost(graph).flops
    assert sum(sum(row["flops"].values()) for row in modules.values()) == summary["flops"]
    assert sum(row["bytes"] for row in modules.values()) == summary["bytes"]
    layers, rows, columns = 2, 96 // 2 // 2, 64  # sliced over tensor and optimizer parallel
    assert modules["model.layers.*.feed_forward"]["weights"] == layers * 3 * rows * columns * 4
    assert modules["model.layers.*.feed_forward"]["state"] == 2 * layers * 3 * rows * columns * 4
    assert modules["model.layers.*.feed_forward"]["flops"]["recomputed"] > 0


def test_a_kept_graph_and_its_mind_ir_are_read_alike(kept, answer, tmp_path):
    (tmp_path / "rank_3").mkdir()
    bare = tmp_path / "rank_3" / "step.mindir"
    bare.write_bytes(load(kept("norms")).mind_ir)
    assert answer("summary", bare) == answer("summary", kept("norms"))
    assert answer("comm", bare) == answer("comm", bare.parent)


def test_every_exchange_has_its_cause(kept, answer):
    found = answer("comm", kept("norms"))["exchanges"]
    causes = Counter((row["cause"], row["operator"], row["phase"]) for row in found)
    weights = 2 * 9 + 3
    assert causes == {
        ("optimizer parallel", "AllGather", "forward"): weights,
        ("optimizer parallel", "ReduceScatter", "backward"): weights,
        ("tensor parallel", "AllGather", "forward"): 2 * 2 + 1,
        ("tensor parallel", "ReduceScatter", "forward"): 2 * 2,
        ("tensor parallel", "AllGather", "backward"): 2 * 2,
        ("tensor parallel", "ReduceScatter", "backward"): 2 * 2 + 1,
        ("tensor parallel", "AllReduce", "forward"): 3,
        ("loss", "AllReduce", "forward"): 1,
        ("loss", "AllReduce", "backward"): 1,
        ("gradient norm", "AllReduce", "update"): 1,
    }
    gather = next(row for row in found if row["place"].endswith("layers.1.feed_forward.w1"))
    assert (gather["cause"], gather["ranks"], gather["bytes"]) == ("optimizer parallel", [1, 3], 48 * 64 * 2)
    assert gather["sent"] == gather["bytes"] // 2


def test_a_pipeline_sends_each_micro_batch_and_gathers_weights_once(kept, answer):
    said = answer("comm", kept("pipeline"))
    times = {(row["operator"], row["cause"], row["times"]) for row in said["exchanges"]}
    assert {row["ranks"] == [2, 6] for row in said["exchanges"] if row["cause"] == "pipeline"} == {True}
    assert ("AllGather", "optimizer parallel", 1) in times
    assert ("AllGather", "tensor parallel", 2) in times
    totals = {(row["cause"], row["link"]): row for row in said["totals"]}
    tokens_of_a_micro_batch = 2 * 2 * 32 * 64 * 2 // 4
    assert totals["pipeline", "inside a node"] == {
        "cause": "pipeline",
        "link": "inside a node",
        "times": 4,
        "bytes": 4 * tokens_of_a_micro_batch,
        "sent": 2 * tokens_of_a_micro_batch,
    }


def test_no_layout_changes_in_the_models_of_this_library(kept, answer):
    for name in ("norms", "pipeline"):
        assert answer("redundant", kept(name))["layout_changes"] == []


EXPERTS = ("experts_and_tensor_parallel", "experts", "grouped_experts", "sent_tokens")
SEQUENCES = ("context_parallel_gather", "context_parallel_ulysses", "context_parallel_adapters")


@pytest.mark.parametrize(
    "form",
    [EXPERTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS[1:] + SEQUENCES)],
)
def test_what_keys_ask_ranks_to_exchange_is_no_needless_exchange(form, answer, tmp_path):
    """Tokens on the way to their experts and back, and around attention. Of tables and scores of routers little is exchanged."""
    main(["save", "--config", str(FORMS / f"{form}.yaml"), "--rank", "0", "--output", str(tmp_path / "rank.graph")])
    changes = answer("redundant", tmp_path / "rank.graph")["layout_changes"]
    dear = [c for c in changes if c["bytes"] and ".router" not in c["producer"] and ".tables" not in c["producer"]]
    assert dear == []
    causes = {exchange["cause"] for exchange in answer("comm", tmp_path / "rank.graph")["exchanges"]}
    assert ("expert parallel" in causes) is (form in EXPERTS)
    assert ("context parallel" in causes) is (form in SEQUENCES)


def test_layout_changes_are_told_with_strategies_line_and_fix(answer):
    changes = answer("redundant", SAMPLE)["layout_changes"]
    told = {(c["producer"].split()[0], c["consumer"].split()[0]): c for c in changes}
    assert set(told) == {("SiLU", "Mul"), ("Mul", "Exp"), ("Exp", "Softmax"), ("Softmax", "MatMul")}
    first = told["SiLU", "Mul"]
    assert (first["before"], first["after"], first["chain"]) == ([2, 2], [2, 1], ["AllGather", "Split", "Concat"])
    assert first["bytes"] == 4 * 96 * 2
    assert first["source"] == "/home/user/net.py:24"
    assert first["fix"].startswith("shard feed_forward.mul with (2, 2)")
    assert told["Softmax", "MatMul"]["fix"] == "shard feed_forward.soft so that it yields (2, 2)"
    assert told["Mul", "Exp"]["bytes"] == 0


def test_show_prints_the_familiar_text(capsys):
    main(["show", "feed_forward", str(SAMPLE)])
    text = capsys.readouterr().out
    assert "= MatMul(%0, %1, Bool(0), Bool(1)) {instance name: mm1}" in text
    assert "# Fullname with scope: (Default/net-Net/feed_forward-FF/SiLU-op0)" in text
    assert "# In file /home/user/net.py:24/ h=self.mul(h,h)" in text
    with pytest.raises(UserError, match=r"no operator in 'feed_froward'; did you mean 'feed_forward'\?"):
        main(["show", "feed_froward", str(SAMPLE)])


def test_differences_are_those_of_the_configurations(kept, answer, capsys):
    same = answer("diff", kept("norms"), kept("norms"))
    assert same["operators"] == same["parameters"] == []
    found = answer("diff", kept("norms"), kept("norms and casts"))
    assert {(row["phase"], row["operator"], row["change"]) for row in found["operators"]} == {
        ("recomputed", "Cast", "added")
    }
    before, after = found["totals"]["kept for the backward pass"]
    assert before > after
    other = answer("diff", kept("norms"), kept("pipeline"))
    assert {row["operator"] for row in other["operators"]} >= {"Receive", "Send"}
    assert any(row["parameter"].startswith("accu_grads.") and not row["before"] for row in other["parameters"])
    main(["diff", str(kept("norms")), str(kept("norms and casts"))])
    assert "differences between operators" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["summary", "comm", "redundant", "recompute"])
def test_tables_are_for_people(command, kept, capsys):
    main([command, str(kept("norms"))])
    assert len(capsys.readouterr().out.splitlines()) > (0 if command == "redundant" else 5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"", "neither a compiled graph, MindIR nor a text"),
        (b"PK\x03\x04 not a zip", "damaged, or not a compiled graph"),
        (b"\x89PNG\r\n\x1a\n" * 40, "neither a compiled graph, MindIR nor a text"),
        (SAMPLE.read_bytes()[:9000], "only a part of the file"),
    ],
)
def test_foreign_and_damaged_files_are_refused(content, said, tmp_path):
    path = tmp_path / "given"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        main(["summary", str(path)])


def test_a_mistake_ends_with_2_and_without_a_traceback(tmp_path, capsys):
    command = [sys.executable, "-m", "toolkit.ir_inspect", "comm", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "holds no graph" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(SystemExit) as ended:
        main(["summary"])
    assert ended.value.code == 2
    assert "the following arguments are required: GRAPH|RUN" in capsys.readouterr().err
    with pytest.raises(UserError, match="rank 99 does not exist"):
        main(["summary", "--config", str(_config(tmp_path)), "--rank", "99"])


def test_the_yaml_of_a_run_is_compiled_without_an_option(answer, tmp_path):
    """As every other verb takes it, with keys behind it: of two runs that differ, those of the second."""
    path = _config(tmp_path)
    found = answer("diff", path, path, "--model.model_config.num_layers=3")
    assert {row["before"] for row in found["parameters"]} == {""}
    assert all(".layers.2." in row["parameter"] for row in found["parameters"])
    assert answer("summary", path, "--batch_size=4")["flops"] > answer("summary", path)["flops"]
    with pytest.raises(UserError, match="--batch_size=2: unknown option; a graph has no keys of a run"):
        main(["summary", str(tmp_path / "rank.graph"), "--batch_size=2"])


def _config(directory):
    from small_cluster import cluster_run

    from mindllm.config import render_config

    path = directory / "run.yaml"
    path.write_text(render_config(cluster_run(tp=2)), encoding="utf-8")
    return path


def test_every_command_shows_an_example(capsys):
    for command in ("summary", "show", "comm", "redundant", "recompute", "diff", "graph", "save"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"example:\n  mindllm inspect {command} " in capsys.readouterr().out
