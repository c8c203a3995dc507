"""Runs on every kind of data through the command line: conversations, blends with documents apart, MindRecord."""

import json
import logging

import numpy as np
import pytest
import yaml
from command_line import read_lines, run, trajectory

from mindllm.cli.view import main as view
from mindllm.config import load_config
from mindllm.errors import UserError
from mindllm.train.batches.datasets import RunData

ANSWERS = [{"instruction": f"Import number {i}.", "input": "", "output": f"import module_{i}\n"} for i in range(40)]
LOADER = "--train_dataset.data_loader"


@pytest.fixture(scope="module")
def conversations(config_file, corpus, tmp_path_factory):
    """The small run on packed conversations of the corpus' tokenizer."""
    directory = tmp_path_factory.mktemp("conversations")
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
    tree = yaml.safe_load(config_file.read_text())
    section = {"data_path": str(directory / "rows.jsonl"), "split": "9,1", "packing": True}
    tree["train_dataset"] = {"data_loader": {"type": "CommonDataLoader", "config": section}}
    tree["model"]["model_config"]["seq_length"] = 96
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.slow
def test_packed_conversations_are_learnt_and_a_stopped_run_repeats_them(conversations, tmp_path):
    printed = run(conversations, tmp_path / "whole")
    assert "36 rows, " in printed
    assert "rows packed into" in printed
    records = read_lines(tmp_path / "whole" / "metrics.jsonl")
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    evaluations = read_lines(tmp_path / "whole" / "evaluation.jsonl")
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert evaluations[-1]["unigram_loss"] is None
    run(conversations, tmp_path / "out", "--runner_config.stop_step=5")
    run(conversations, tmp_path / "out", "--resume_training")
    assert trajectory(tmp_path / "out") == trajectory(tmp_path / "whole")


@pytest.mark.slow
def test_a_resume_with_another_batch_size_continues_with_the_next_sample(conversations, tmp_path):
    run(conversations, tmp_path / "out", "--runner_config.batch_size=2", "--runner_config.stop_step=3")
    sizes = ["--runner_config.batch_size=3", "--runner_config.stop_step=5"]
    printed = run(conversations, tmp_path / "out", "--resume_training", *sizes)
    assert "continuing after the 6 samples consumed so far" in printed
    newest = max((tmp_path / "out" / "checkpoint").glob("llm-*"), key=lambda path: path.stat().st_mtime)
    assert json.loads((newest / "state.json").read_text())["consumed_samples"] == 12


def test_joined_conversations_and_only_the_first_rows(conversations, tmp_path):
    options = [f"{LOADER}.config.packing=joined", f"{LOADER}.config.max_rows=20", "--runner_config.stop_step=2"]
    printed = run(conversations, tmp_path / "out", *options)
    assert "18 rows, " in printed
    assert "18 rows packed into" in printed


@pytest.mark.slow
def test_blended_corpora_with_documents_apart(config_file, corpus, tmp_path):
    options = [f"{LOADER}.config.data_path=[0.25, {corpus}/corpus, 0.75, {corpus}/corpus]"]
    options += [f"{LOADER}.config.{key}" for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")]
    printed = run(config_file, tmp_path / "out", *options)
    assert "held-out loss" in printed
    records = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert records[-1]["loss"] < records[0]["loss"] - 0.2


def test_a_run_on_mind_record(config_file, corpus, tmp_path):
    from mindspore.mindrecord import FileWriter

    from mindllm.data import Corpus

    tokens = Corpus(corpus / "corpus").split("train", "1").tokens
    rows = [{"input_ids": np.array(tokens[32 * i : 32 * i + 33], np.int32)} for i in range(200)]
    path = tmp_path / "rows.mindrecord"
    writer = FileWriter(str(path), shard_num=1)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "tokens")
    writer.write_raw_data(rows)
    writer.commit()
    tree = yaml.safe_load(config_file.read_text())
    tree["train_dataset"] = {"data_loader": {"type": "MindDataset", "config": {"data_path": str(path), "split": "9,1"}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    run(tmp_path / "run.yaml", tmp_path / "out", "--runner_config.train_steps=4")
    records = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert [record["tokens"] for record in records] == [4 * 32] * 4
    assert np.isfinite([record["loss"] for record in records]).all()


def test_the_viewer_shows_what_is_trained(conversations, capsys):
    view(["--config", str(conversations), "--samples", "3", "--json"])
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["sample"] for sample in shown] == [0, 1, 2]
    outputs = {row["output"].strip() + "<|endoftext|>" for row in ANSWERS}
    for sample in shown:
        assert sample["trained"] == sum(segment["trained"] for segment in sample["segments"])
        for segment in sample["segments"]:
            read, trained = segment["parts"]
            assert (read["trained"], trained["trained"]) == (False, True)
            assert trained["text"] in outputs
            assert read["text"].startswith("### Instruction:\nImport number ")
    view(["--config", str(conversations)])
    text = capsys.readouterr().out
    assert "### Response:" in text
    assert "positions 0 to" in text
    view(["--config", str(conversations), "--ids"])
    assert "·" in capsys.readouterr().out
    view(["--config", str(conversations), "--count", "--json"])
    assert json.loads(capsys.readouterr().out)["rows"] == 36
    alone = ["--config", str(conversations), f"{LOADER}.config.packing=false"]
    view(alone)
    assert capsys.readouterr().out.count("positions of padding") == 1
    view([*alone, "--json"])
    sample = json.loads(capsys.readouterr().out)
    assert 0 < sample["padding"] < sample["places"]
    assert sample["segments"][0]["parts"][-1]["trained"], "no padding behind the answer"
    view([*alone, "--count"])
    assert "of a batch is padding without train_dataset.data_loader.config.packing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"instruction": "q"}', "rows.jsonl:41: of no known form (keys: instruction)"),
        ('{"instruction": "q", "output": ', "rows.jsonl:41: not a line of JSON"),
    ],
)
@pytest.mark.parametrize("packing", [True, False])
def test_a_bad_row_ends_the_run_with_its_place(conversations, tmp_path, row, says, packing):
    rows = "".join(json.dumps(entry) + "\n" for entry in ANSWERS) + row + "\n"
    (tmp_path / "rows.jsonl").write_text(rows)
    options = [f"{LOADER}.config.data_path={tmp_path}/rows.jsonl", f"{LOADER}.config.split=1"]
    printed = run(
        conversations,
        tmp_path / "out",
        *options,
        f"{LOADER}.config.packing={packing}".lower(),
        "--do_eval=false",
        expect=2,
    )
    assert says in printed


def test_bad_rows_are_left_out_and_counted_where_the_run_says_so(conversations, tmp_path, caplog):
    good = [json.dumps(entry) for entry in ANSWERS]
    (tmp_path / "rows.jsonl").write_text("\n".join([*good[:5], "{", *good[5:], '{"instruction": "q"}']) + "\n")
    options = [f"{LOADER}.config.data_path={tmp_path}/rows.jsonl", f"{LOADER}.config.split=1", "--do_eval=false"]
    for packing in ("true", "false"):
        chosen = [*options, f"{LOADER}.config.packing={packing}"]
        with pytest.raises(
            UserError, match=r"2 of 42 rows of train are invalid(.|\n)*rows.jsonl:6: (.|\n)*rows.jsonl:42: "
        ):
            RunData(load_config(conversations, chosen)).dataset  # noqa: B018
        logger = logging.getLogger("mindllm")
        logger.propagate = True
        with caplog.at_level(logging.WARNING):
            data = RunData(load_config(conversations, [*chosen, f"{LOADER}.config.skip_bad_rows=true"]))
            assert len(data.text.usable("train")) == len(ANSWERS)
            assert data.dataset.sample(0)["loss_mask"].any()
        assert "skipped 2 of 42 invalid rows of train" in caplog.text
