"""GGUF through the commands: described, exported, imported, loaded; transformers computes the same of file and directory."""

import json

import numpy as np
import pytest

from mindllm.cli.weights import main
from mindllm.config import load_config, read_model_config
from mindllm.data import load_tokenizer
from mindllm.train.checkpoint import load_checkpoint
from mindllm.weight_files import find_pretrained, read_hugging_face

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hugging_face import random_llama  # noqa: E402
from tiny_gguf import write_gguf  # noqa: E402

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": True}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24))


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf", random_llama(std=0.1, **SIZES), "llama", "Q5_1")


def logits(directory, **named):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **named).eval()
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)).logits.numpy()


def test_what_is_exported_computes_what_the_file_does(file, tmp_path):
    assert main(["export", str(file), str(tmp_path / "directory")]) == 0
    theirs = logits(tmp_path, gguf_file="model.gguf")
    np.testing.assert_allclose(logits(tmp_path / "directory"), theirs, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "directory")
    assert tokenizer("Āā").input_ids == load_tokenizer(file).encode("Āā")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_our_model_computes_what_transformers_does(file, tmp_path):
    from mindspore import Tensor, nn
    from mindspore import ops as P

    from mindllm.models import build_model
    from mindllm.models.weights import assign, trained_weights

    class Logits(nn.Cell):
        def __init__(self, model):
            super().__init__(auto_prefix=False)
            self.model = model

        def construct(self, input_ids):
            return P.reshape(self.model.logits(self.model.model(input_ids)), (*input_ids.shape, -1))

    config = read_model_config(file).model_copy(update={"seq_length": TOKENS.shape[1]})
    model = build_model(config)
    assign(trained_weights(model), read_hugging_face(file, config))
    ours = Logits(model)(Tensor(TOKENS.astype(np.int32))).asnumpy()
    np.testing.assert_allclose(ours, logits(tmp_path, gguf_file="model.gguf"), atol=1e-4)


def test_info_import_and_runs_take_the_file(file, tmp_path, capsys):
    assert main(["info", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["files"], told["tokenizer"]) == ("GGUF file", ["model.gguf"], str(file))
    assert told["parameters"] == sum(value.numel() for value in random_llama(**SIZES).parameters())
    assert main(["import", str(file), str(tmp_path / "checkpoint")]) == 0
    checkpoint = load_checkpoint(tmp_path / "checkpoint" / "llm-0", option="x", with_optimizer=False)
    assert checkpoint.state["tokenizer"] == str(file)
    for name, weight in read_hugging_face(file, read_model_config(file)).items():
        np.testing.assert_array_equal(np.asarray(checkpoint.weights[name]), np.asarray(weight))
    run = load_config({"load_checkpoint": str(file), "run_mode": "predict"})
    assert run.processor.tokenizer.vocab_file == str(file)
    assert find_pretrained(run).run_weights(run).keys() == checkpoint.weights.keys()
