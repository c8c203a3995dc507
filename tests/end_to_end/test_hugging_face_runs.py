"""From one Hugging Face directory to another through the command line: fine-tuned, stopped, resumed, evaluated, exported."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from command_line import ROOT, STEPS, read_lines, run, trajectory
from safetensors.numpy import load_file

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from hugging_face import save_llama  # noqa: E402

SIZES = {"vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 64, "std": 0.05}


@pytest.fixture(scope="module")
def directory(corpus, tmp_path_factory):
    """A random Llama in shards as transformers writes it, with the tokenizer of the corpus."""
    path = tmp_path_factory.mktemp("published") / "llama"
    save_llama(path, max_shard_size="60KB", tie_word_embeddings=True, eos_token_id=0, **SIZES)
    shutil.copy(corpus / "tokenizer.json", path / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def bare_config(config_file, directory):
    """The run of the other tests without a word of architecture or tokenizer."""
    content = yaml.safe_load(config_file.read_text())
    del content["processor"]
    content["model"] = {"model_config": {"seq_length": 32}}
    content["load_checkpoint"] = str(directory)
    content["generation"] = {"max_new_tokens": 12}
    path = directory.with_name("bare.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def tuned(bare_config, tmp_path_factory):
    """A run of fine-tuning to its end: (output directory, what it printed)."""
    output = tmp_path_factory.mktemp("tuned") / "out"
    export = (f"--export_hf.directory={output}/hf", "--export_hf.max_shard_size=60KB")
    return output, run(bare_config, output, "--run_mode=finetune", *export)


def line_of(printed, text):
    return next(line for line in printed.splitlines() if text in line)


def test_it_starts_from_the_weights_and_is_evaluated_before_and_after(tuned, directory):
    output, printed = tuned
    held_out = read_lines(output / "evaluation.jsonl")
    assert [record["step"] for record in held_out] == [0, 6, 12]
    assert held_out[-1]["loss"] < held_out[0]["loss"] - 0.2
    assert f"{held_out[0]['loss']:.4f}" in line_of(printed, "held-out before")
    assert f"weights of {directory}" in printed
    first = read_lines(output / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(held_out[0]["loss"], abs=0.5)


def test_the_export_is_what_was_trained_and_transformers_loads_it(tuned):
    output, printed = tuned
    assert f"Hugging Face directory  {output.name}/hf" in printed  # as seen from where it was started
    llama, info = transformers.LlamaForCausalLM.from_pretrained(output / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    trained = load_file(output / "checkpoint" / f"llm-{STEPS}" / "model.safetensors")
    np.testing.assert_array_equal(
        llama.get_input_embeddings().weight.detach(), trained["model.tok_embeddings.embedding_weight"]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "hf")
    assert tokenizer.eos_token == "<|endoftext|>"


def test_the_export_is_evaluated_alike_and_continues_a_prompt_as_transformers_does(tuned, bare_config, tmp_path):
    output, _ = tuned
    printed = run(bare_config, tmp_path / "eval", "--run_mode=eval", f"--load_checkpoint={output}/hf")
    assert f"loss: {read_lines(output / 'evaluation.jsonl')[-1]['loss']:.4f} nats/token" in printed

    options = ("--run_mode=predict", f"--load_checkpoint={output}/hf", "--input_data=import os")
    printed = run(bare_config, tmp_path / "predict", *options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "hf")
    llama = transformers.LlamaForCausalLM.from_pretrained(output / "hf")
    prompt = tokenizer("import os", return_tensors="pt")
    text = tokenizer.decode(llama.generate(**prompt, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True)
    assert text in printed


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_in_the_same_export(tuned, bare_config, tmp_path):
    output, export = tmp_path / "out", tmp_path / "hf"
    options = (f"--export_hf.directory={export}", "--export_hf.max_shard_size=60KB")
    printed = run(bare_config, output, "--run_mode=train", *options, "--runner_config.stop_step=5")
    assert "exported" not in printed
    assert not export.exists()
    run(bare_config, output, "--run_mode=finetune", *options, "--resume_training")
    assert trajectory(output) == trajectory(tuned[0])
    files = sorted(path.name for path in export.iterdir())
    assert len([name for name in files if name.startswith("model-")]) > 1
    assert files == sorted(path.name for path in (tuned[0] / "hf").iterdir())
    assert all((export / name).read_bytes() == (tuned[0] / "hf" / name).read_bytes() for name in files)


def test_a_checkpoint_of_the_run_is_exported_by_the_tool(tuned, tmp_path):
    output, _ = tuned
    command = [
        sys.executable,
        "-m",
        "mindllm.main",
        "weights",
        "export",
        output / "checkpoint" / f"llm-{STEPS}",
        tmp_path / "hf",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = ["--max_shard_size", "60KB"]
    subprocess.run([*map(str, command), *options], check=True, env=environment, timeout=100)
    names = [path.name for path in (output / "hf").iterdir()]
    assert all((tmp_path / "hf" / name).read_bytes() == (output / "hf" / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--model.model_config.num_layers=3"], ["num_layers", "config.json, which is 2 (value 3)"]),
        (["--processor.tokenizer.vocab_file=TOKENIZER", "--run_mode=predict", "--input_data=a"], ["600", "512"]),
        (["--processor.tokenizer.vocab_file=TOKENIZER"], ["600 tokens", "512"]),
        (["--export_hf.directory=DIRECTORY"], ["exists already"]),
        (["--load_checkpoint=DIRECTORY/config.json", "--pretrained_model_dir=DIRECTORY"], ["is a file", "DIRECTORY"]),
        (["--export_hf.max_shard_size=5"], ["export_hf.max_shard_size", "a size such as 5GB"]),
    ],
)
def test_mistakes(directory, bare_config, tmp_path, options, wanted):
    from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe

    words = [f"word{index} " * 3 for index in range(2000)]
    save_tokenizer(train_byte_level_bpe(words, 600), tmp_path / "tokenizer.json")
    places = {"DIRECTORY": str(directory), "TOKENIZER": str(tmp_path / "tokenizer.json")}

    def placed(text):
        for name, path in places.items():
            text = text.replace(name, path)
        return text

    printed = run(bare_config, tmp_path / "out", "--run_mode=finetune", *map(placed, options), expect=2)
    for word in ("error: ", *wanted):
        assert placed(word) in printed


def test_damaged_weights_are_told_before_anything_is_trained(directory, bare_config, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(directory, damaged)
    shard = sorted(damaged.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 5)
    printed = run(bare_config, tmp_path / "out", "--run_mode=finetune", f"--load_checkpoint={damaged}", expect=2)
    assert f"{shard}: not a safetensors file, or incomplete" in printed
    assert not list((tmp_path / "out").rglob("*.safetensors"))


TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.mark.slow
def test_conversations_in_its_own_template_are_learnt_and_exported(directory, bare_config, tmp_path):
    model = tmp_path / "llama"
    shutil.copytree(directory, model)
    special = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(special))
    turns = [
        [{"role": "user", "content": f"Import {i}."}, {"role": "assistant", "content": f"import m{i}"}]
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    content = yaml.safe_load(bare_config.read_text())
    section = {"data_path": str(tmp_path / "rows.jsonl"), "split": "9,1", "packing": True}
    content["train_dataset"] = {"data_loader": {"type": "CommonDataLoader", "config": section}}
    content["model"]["model_config"]["seq_length"] = 64
    content["load_checkpoint"] = str(model)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    export = f"--export_hf.directory={tmp_path}/hf"
    run(tmp_path / "run.yaml", tmp_path / "out", "--run_mode=finetune", export)
    losses = [record["loss"] for record in read_lines(tmp_path / "out" / "evaluation.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = tokenizer.apply_chat_template(turns[0], tokenize=False)
    assert text == "user: Import 0.\nassistant: import m0\n"
