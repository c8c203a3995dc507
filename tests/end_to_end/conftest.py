"""A small corpus of real text, and a small run on it."""

import sysconfig
from pathlib import Path

import pytest
import yaml
from command_line import STEPS, run

from mindllm.data import CorpusWriter, load_tokenizer
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe

RUN = {
    "do_eval": True,
    "eval_step_interval": 6,
    "runner_config": {"batch_size": 4, "train_steps": STEPS},
    "context": {"enable_graph_kernel": False},
    "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": 2e-2, "warmup_steps": 3},
    "eval_dataset": {"max_batches": 2},
    "callbacks": [
        {"type": "MFLossMonitor"},
        {"type": "MetricsMonitor"},
        {"type": "SummaryMonitor"},
        {"type": "CheckpointMonitor", "save_checkpoint_steps": 2, "keep_checkpoint_max": 3},
        {"type": "NaNMonitor"},
    ],
    "model": {
        "model_config": {
            "vocab_size": 512,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "n_kv_heads": 2,
            "intermediate_size": 88,
            "seq_length": 32,
        }
    },
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A directory with ``corpus.bin``/``.idx`` and ``tokenizer.json`` made of some modules of the standard library."""
    directory = tmp_path_factory.mktemp("corpus")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    texts = [path.read_text(encoding="utf-8") for path in sources]
    save_tokenizer(train_byte_level_bpe(texts, 512), directory / "tokenizer.json")
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    with CorpusWriter(directory / "corpus", tokenizer, append_eod=True, source_fingerprint="a*.py") as writer:
        for text in texts:
            writer.append(tokenizer.encode(text))
            writer.end_text(len(text.encode()))
    return directory


@pytest.fixture(scope="session")
def config_file(corpus):
    """The YAML of a run of 12 steps with a checkpoint every 2."""
    run = {
        **RUN,
        "train_dataset": {"data_loader": {"config": {"data_path": str(corpus / "corpus"), "split": "80,20"}}},
        "processor": {"tokenizer": {"vocab_file": str(corpus / "tokenizer.json")}},
        "context": {**RUN["context"], "compile_cache_path": str(corpus / "compiled")},  # most runs have the same graph
    }
    path = corpus / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


@pytest.fixture(scope="session")
def finished(config_file, tmp_path_factory):
    """A run from start to end without interruption: (output directory, what it printed)."""
    output = tmp_path_factory.mktemp("finished") / "out"
    options = ("--profile", "--profile_start_step=3", "--profile_stop_step=4")
    return output, run(config_file, output, *options)
