"""What the commands of how-to pages find in their directory: small runs, models, data and recordings by the names of pages."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml
from kept_programs_here import unpacked
from markdown_pages import ROOT, blocks

from mindllm.cache import user_cache

CLUSTER = f"""\
base: {ROOT}/configs/llama2/pretrain_llama2_7b_8p.yaml
trainer: {{model_name: small}}
model:
  model_config: {{vocab_size: 2048, hidden_size: 256, intermediate_size: 512, num_layers: 8, num_heads: 8, seq_length: 256}}
"""
LEARNING = """\
base: configs/base/pretrain.yaml
use_parallel: false
context: {device_target: CPU}
parallel: {enable_parallel_optimizer: false}
runner_config: {batch_size: 2, train_steps: 2}
lr_schedule: {learning_rate: 2.0e-4}
train_dataset:
  data_loader: {type: CommonDataLoader, config: {data_path: chats.jsonl, split: "80,20"}}
model: {model_config: {seq_length: 64}}
generation: {max_new_tokens: 4}
"""
SIZES = (  # those of the tiny model, which weights of MindFormers do not say
    "seq_length: 64, vocab_size: 300, hidden_size: 32, intermediate_size: 80, num_layers: 2, num_heads: 4, n_kv_heads: 2"
)
TOKENIZER = "processor: {tokenizer: {vocab_file: models/llama/tokenizer.json}}\n"
MINDFORMERS = user_cache("mindformers")  # before a test has a cache of its own: what was downloaded once is kept


def block_of(page: str, language: str, number: int = 0) -> str:
    """Return the text of a block of a page."""
    return [block.text for block in blocks(ROOT / "docs" / f"{page}.md") if block.language == language][number]


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def rows(name: str, count: int, row: Callable[[int], dict[str, object]]) -> None:
    write(name, "".join(json.dumps(row(number)) + "\n" for number in range(count)))


def conversations(name: str = "chats.jsonl", count: int = 36) -> None:
    from tiny_chat import conversation

    rows(name, count, conversation)


def chat_model(*names: str) -> None:
    """Write one tiny model with a tokenizer below several names."""
    from tiny_chat import save_tiny_chat_model

    for name in names:
        save_tiny_chat_model(Path(name), max_position_embeddings=1024)


def cluster_run() -> None:
    write("run.yaml", CLUSTER)


def tour() -> None:
    """Write a run that recomputes norms alone."""
    write(
        "run.yaml",
        CLUSTER.replace("num_layers: 8", "num_layers: 4") + "recompute_config: {select_recompute: ['.*\\.norm']}\n",
    )


def proving() -> None:
    cluster_run()
    for name in ("runs/a.yaml", "runs/b.yaml", "main/run.yaml"):
        write(name, CLUSTER)


def proved_before() -> None:
    """Make the data of the runs, and an earlier proof."""
    corpus("data/pretrain/corpus", "data/llama2/tokenizer.model", 2048)
    command = ["bin/mindllm", "prove", "main/run.yaml", "--quick", "--output", "main"]
    assert subprocess.run(command, capture_output=True).returncode == 1


def programs(**names: str) -> Callable[[], None]:
    """Return what unpacks kept programs below the names of a page."""

    def unpack() -> None:
        for name, kept in names.items():
            unpacked(kept, Path()).rename(name)

    return unpack


def cluster_check() -> None:
    cluster_run()
    programs(cluster="mlp_cluster", single="mlp_single")()


def any_program() -> None:
    """Unpack small programs of the tests; two stand for runs of MindFormers."""
    kept = {name: name for name in ("loss_over_devices", "loss_over_devices_single")}
    programs(output_offline="mlp_a", output_a="mlp_a", output_b="mlp_b", **kept)()


def mindformers_yaml() -> None:
    """Take the YAML of MindFormers 1.3.0, which the package index has."""
    from public_yamls import yamls_of_release

    shutil.copy(
        yamls_of_release("1.3.0", MINDFORMERS) / "configs/llama2/pretrain_llama2_7b.yaml", "pretrain_llama2_7b.yaml"
    )


def planning() -> None:
    cluster_run()
    shutil.copy(ROOT / "mindllm/timing/devices/a100_80g.yaml", "my_device.yaml")


def pipeline_balance() -> None:
    cluster_run()
    write("problem.json", block_of("pipeline_balance", "json"))
    shutil.copy(ROOT / "tests/ground_truth/sapp_test_96_layers.json", "layers.json")
    programs(output_even="mlp_a", output_shifted="mlp_b")()
    measured_stages("init.yaml")


def measured_stages(name: str) -> None:
    """Write what a user measured of eight stages, in the form of the public planner: MB at the peak of each."""
    offset, full = [0, 1, 0, -1, 0, 0, 1, -1], [4, 3, 2, 1, 0, 2, 3, 1]
    peaks = []
    for stage, (more, repeated) in enumerate(zip(offset, full, strict=True)):
        layers, alive = 4 + more, len(offset) - stage
        peaks.append(700 + 900 * layers + alive * (800 * (layers - repeated) + 40 * repeated))
    body = {"stage_id": list(range(1, 7)), "memories": peaks[1:-1]}
    fields = {
        "pipeline_config": {"pipeline_num": 8, "num_layer": 32, "offset": offset},
        "recompute_config": {"recompute": full},
        "memory_usage": {"head_memory": peaks[0] + 2000, "tail_memory": peaks[-1] + 3000, "body_memories": body},
        "time_config": {"head": 3, "body": 10, "tail": 9},
    }
    write(name, yaml.safe_dump(fields))


def step_time() -> None:
    cluster_run()
    programs(output_offline="mlp_a")()
    measured = []
    for size, seconds in ((1, 0.9), (2, 1.6), (4, 3.1)):
        write(f"run{size}.yaml", f"base: run.yaml\nrunner_config: {{batch_size: {size}}}\n")
        measured.append(f"run{size}.yaml,{seconds}\n")
    write("steps.csv", "config,seconds\n" + "".join(measured))


def profiles() -> None:
    """Write a run and the profile of its predicted step, in the files of MindSpore's profiler."""
    from profile_maker import KEYS, YAML, Maker, Plants, small_run

    from mindllm.timing.configured import workload_of
    from mindllm.timing.device import DEFAULT, read_device
    from mindllm.timing.step import step_time as predicted

    keys = "".join(f"{key.removeprefix('--').replace('=', ': ')}\n" for key in KEYS)
    write("run.yaml", f"base: {YAML}\n{nested(keys)}")
    step = predicted(workload_of(small_run()[2]), read_device(DEFAULT))
    Maker(step, Plants(host=0.3)).write(Path("output/profile"))


def nested(keys: str) -> str:
    """Return ``a.b: 1`` as a tree of YAML."""
    tree: dict[str, object] = {}
    for path, value in yaml.safe_load(keys).items():
        *above, last = path.split(".")
        node = tree
        for name in above:
            node = node.setdefault(name, {})  # type: ignore[assignment]
        node[last] = value
    return yaml.safe_dump(tree)


def recipes() -> None:
    chat_model("models/SmolLM2-135M-Instruct")
    conversations()
    rows("corpus.jsonl", 200, lambda number: {"text": f"import module_{number}"})
    from tiny_chat import pair

    rows("pairs.jsonl", 20, pair)
    rows(
        "answers.jsonl",
        20,
        lambda number: {"prompt": f"Is {number} even?", "completion": "yes", "label": number % 2 == 0},
    )


def fine_tuning() -> None:
    chat_model("models/base")
    conversations()
    write("lora.yaml", block_of("fine_tuning", "yaml"))


def corpus(prefix: str = "data/stdlib/corpus", tokenizer: str = "data/stdlib/tokenizer.json", size: int = 4096) -> None:
    """Make a corpus of the sources of mindllm and a tokenizer of its own, where a shipped run looks for them."""
    paths = sorted((ROOT / "mindllm").rglob("*.py"))
    rows("texts.jsonl", len(paths), lambda number: {"text": paths[number].read_text(encoding="utf-8")})
    options = ["--train-tokenizer", str(size), "--tokenizer", tokenizer, "--output-prefix", prefix]
    subprocess.run(["bin/mindllm", "data", "texts.jsonl", *options], check=True, capture_output=True)


def clusters() -> None:
    corpus()
    corpus("data/pretrain/corpus", "data/llama2/tokenizer.model", 2048)


def weights() -> None:
    """Write a model in three forms: a Hugging Face directory, a GGUF file, and what MindFormers saved."""
    from tiny_chat_gguf import save_tiny_chat_gguf

    chat_model("models/llama")
    conversations()
    write("run.yaml", LEARNING.replace("seq_length: 64", SIZES) + TOKENIZER)
    saved_by_mindformers("theirs/checkpoint/model.safetensors", "models/llama")
    save_tiny_chat_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"))


def saved_by_mindformers(name: str, model: str) -> None:
    """Write random weights of a model as a legacy Llama of MindFormers saves them."""
    import numpy as np
    from safetensors.numpy import save_file

    from mindllm.config import load_config

    shapes = load_config("run.yaml", [f"--load_checkpoint={model}"]).model.config.architecture.weight_shapes()
    random = np.random.default_rng(0)
    Path(name).parent.mkdir(parents=True)
    save_file({key: random.normal(0, 0.1, shape).astype(np.float32) for key, shape in shapes.items()}, name)


def quantization() -> None:
    """Write a model, and the same in codes."""
    from tiny_chat import WORDS

    chat_model("models/llama")
    conversations()
    write("lora.yaml", block_of("fine_tuning", "yaml"))
    write("text.txt", "\n".join(WORDS * 20))
    command = ["bin/mindllm", "weights", "quantize", "models/llama", "models/llama-gptq", "--method", "rtn"]
    subprocess.run(command, check=True, capture_output=True)


def generation() -> None:
    """Write a run and a checkpoint of it."""
    chat_model("models/llama")
    conversations()
    write("run.yaml", LEARNING + "pretrained_model_dir: models/llama\n")
    rows("prompts.jsonl", 3, lambda number: {"prompt": f"import {number}"})
    options = ["--runner_config.train_steps=400", "--load_checkpoint=models/llama"]
    subprocess.run(["bin/mindllm", "train", "run.yaml", *options], check=True, capture_output=True)


def evaluation() -> None:
    from tiny_hub import write_data

    chat_model("model")
    write_data(Path("hub"))
