"""From a trained checkpoint to text: predictions in files and a conversation, through the command line."""

import json

import pytest
from command_line import read_lines, run


@pytest.fixture(scope="module")
def weights(finished):
    """The option that loads what the run has learnt, and a directory for results."""
    output, _ = finished
    return f"--load_checkpoint={output}/checkpoint/llm-12"


def test_requests_in_a_file_become_results_in_a_file(config_file, weights, tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": "def " * (1 + index), "id": index}) + "\n" for index in range(5)))
    generation = "--generation={max_new_tokens: 8, do_sample: true, top_p: 0.9, min_p: 0.01, output_logprobs: true}"
    options = ("--run_mode=predict", weights, f"--input_data={asked}", generation, "--predict_batch_size=2")
    printed = run(config_file, tmp_path / "out", *options, "--save_file=results.jsonl")
    results = read_lines(tmp_path / "results.jsonl")
    assert [result["id"] for result in results] == list(range(5))
    assert all(len(result["continuations"][0]["logprobs"]) <= 8 for result in results)
    assert "results: results.jsonl" in printed
    assert "decode: " in printed
    run(config_file, tmp_path / "out", *options[:-1], "--save_file=again.jsonl")
    assert read_lines(tmp_path / "again.jsonl") == results, "a seed repeats the draws in batches of another size"


def test_a_conversation(config_file, weights, tmp_path):
    options = ("--run_mode=chat", weights, "--generation.max_new_tokens=6")
    printed = run(config_file, tmp_path / "out", *options, typed="a\nclear\na\nq\n")
    assert "\nnew conversation\n" in printed
    assert "decode: " in printed


def test_mistakes_are_told(config_file, weights, tmp_path):
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    options = ("--run_mode=predict", weights)
    printed = run(config_file, tmp_path / "out", *options, "--input_data=asked.jsonl", expect=2)
    assert "asked.jsonl:2: neither a prompt nor a conversation" in printed
    printed = run(config_file, tmp_path / "out", "--run_mode=chat", expect=2)
    assert "run_mode chat needs weights" in printed
