"""``mindllm weights`` on adapters: out of checkpoints, into their base and out again, and what does not belong together."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mindllm.cli.weights import main
from mindllm.command import run_command
from mindllm.config import ModelConfig, read_model_config
from mindllm.config.tuning import PetConfig
from mindllm.families import with_file_names
from mindllm.generate.graphs.library import supports
from mindllm.train.checkpoint import CheckpointStore, RankTensors, load_checkpoint
from mindllm.train.checkpoint.loading import Base
from mindllm.weight_files import fingerprint, read_hugging_face, write_weights
from mindllm.weight_files.pretrained import read_adapter

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2}
MODEL = with_file_names(ModelConfig(**SIZES, intermediate_size=48, seq_length=16))


def random_weights(shapes, seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def base_directory(path, seed=0):
    write_weights(path, MODEL, random_weights(MODEL.architecture.weight_shapes(), seed))
    return path


def tuned_checkpoint(directory, base, **keys):
    """A checkpoint of a run beside ``base``."""
    keys = keys if "pet_type" in keys else {"lora_rank": 4, **keys}
    model = MODEL.model_copy(update={"pet_config": PetConfig(**keys)})
    trained = random_weights(model.architecture.trained_shapes(), 5)
    record = Base(str(base), fingerprint(read_hugging_face(base, MODEL)))
    state = {
        "base": {"path": record.path, "fingerprint": record.fingerprint},
        "identity": {"model": {"config": model.model_dump(mode="json")}},
    }
    return CheckpointStore(directory, keep_checkpoint_max=9).save(3, {0: RankTensors(trained, {})}, state)


@pytest.fixture
def base(tmp_path):
    return base_directory(tmp_path / "base")


def tool(*arguments):
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        run_command(main, [str(argument) for argument in arguments])
    return ended.value.code or 0


def weights(directory):
    return {name: np.asarray(item) for name, item in read_hugging_face(directory, MODEL).items()}


def test_merged_and_taken_out_again(base, tmp_path):
    checkpoint = tuned_checkpoint(tmp_path / "checkpoint", base)
    assert tool("adapter", checkpoint, tmp_path / "adapter") == 0
    assert tool("merge", checkpoint, tmp_path / "one") == 0
    assert tool("merge", tmp_path / "adapter", tmp_path / "two", "--base", base) == 0
    one, two, before = weights(tmp_path / "one"), weights(tmp_path / "two"), weights(base)
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])
    assert any(np.abs(array - before[name]).max() > 1e-2 for name, array in one.items())
    assert tool("unmerge", tmp_path / "one", tmp_path / "adapter", tmp_path / "again") == 0
    for name, array in weights(tmp_path / "again").items():
        np.testing.assert_allclose(array, before[name], atol=1e-6)
    content = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (content["r"], content["base_model_name_or_path"]) == (4, str(base))


def test_the_directory_of_a_run_stands_for_its_newest_checkpoint(base, tmp_path, capsys):
    checkpoint = tuned_checkpoint(tmp_path / "run" / "checkpoint", base)
    assert tool("merge", tmp_path / "run", tmp_path / "one") == 0
    assert tool("merge", checkpoint, tmp_path / "two") == 0
    for name, array in weights(tmp_path / "one").items():
        np.testing.assert_array_equal(array, weights(tmp_path / "two")[name])
    assert tool("info", tmp_path / "run") == 0
    for directory in ("begun", "two"):  # the second is a model, whatever lies below it
        (tmp_path / directory / "checkpoint").mkdir(parents=True)
    assert tool("info", tmp_path / "two") == 0
    assert tool("adapter", tmp_path / "begun", tmp_path / "none") == 2
    assert "the run has no checkpoint yet" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_adapter_of_another_base_is_refused_and_nothing_is_written(base, tmp_path, capsys):
    checkpoint = tuned_checkpoint(tmp_path / "checkpoint", base)
    tool("adapter", checkpoint, tmp_path / "adapter")
    other = base_directory(tmp_path / "other", seed=1)
    for adapter in (checkpoint, tmp_path / "adapter"):
        capsys.readouterr()
        assert tool("merge", adapter, tmp_path / "merged", "--base", other) == 2
        message = capsys.readouterr().err
        assert "was trained with another base" in message
        assert message.count("\n") == 1
    assert not (tmp_path / "merged").exists()
    assert not list(tmp_path.glob(".merged*"))


def test_an_adapter_of_another_model_is_refused(base, tmp_path, capsys):
    checkpoint = tuned_checkpoint(tmp_path / "checkpoint", base)
    tool("adapter", checkpoint, tmp_path / "adapter")
    wide = MODEL.model_copy(update={"intermediate_size": 64})
    write_weights(tmp_path / "wide", wide, random_weights(wide.architecture.weight_shapes(), 0))
    for adapter in (checkpoint, tmp_path / "adapter"):
        capsys.readouterr()
        assert tool("merge", adapter, tmp_path / "merged", "--base", tmp_path / "wide") == 2
        assert "adapter does not match this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type: unsupported (value IA3)"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj.lora_A has rank 4, but adapter_config.json gives 2"),
        ({"r": "four"}, "cannot be read"),
    ],
)
def test_files_of_peft_that_are_not_read(base, tmp_path, capsys, change, words):
    tool("adapter", tuned_checkpoint(tmp_path / "checkpoint", base), tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    capsys.readouterr()
    assert tool("merge", tmp_path / "adapter", tmp_path / "merged", "--base", base) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "words"), [({"use_dora": True}, "row lengths"), ({"modules_to_save": ("norm_out",)}, "whole modules")]
)
def test_what_cannot_be_taken_out_again(base, tmp_path, capsys, keys, words):
    checkpoint = tuned_checkpoint(tmp_path / "checkpoint", base, **keys)
    assert tool("merge", checkpoint, tmp_path / "merged") == 0
    assert tool("unmerge", tmp_path / "merged", checkpoint, tmp_path / "again") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_new_layers_are_layers_of_the_merged_model(base, tmp_path, capsys):
    checkpoint = tuned_checkpoint(tmp_path / "checkpoint", base, pet_type="llamapro", num_new_blocks=2)
    assert tool("merge", checkpoint, tmp_path / "merged") == 0
    assert json.loads((tmp_path / "merged/config.json").read_text())["num_hidden_layers"] == 4
    found = read_hugging_face(tmp_path / "merged", read_model_config(tmp_path / "merged"))
    before, trained = weights(base), load_checkpoint(checkpoint, with_optimizer=False).weights
    for ours, theirs in ((0, 0), (2, 1)):
        name = "model.layers.{}.feed_forward.w2.weight"
        np.testing.assert_array_equal(np.asarray(found[name.format(ours)]), before[name.format(theirs)])
    assert {name.split(".")[2] for name in trained} == {"1", "3"}
    for name, array in trained.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(array))
    assert tool("unmerge", tmp_path / "merged", checkpoint, tmp_path / "again") == 2
    assert "new layers stand between those of its base" in capsys.readouterr().err
    assert tool("adapter", checkpoint, tmp_path / "adapter") == 2
    assert "PEFT's format requires an adapter" in capsys.readouterr().err


def test_bottlenecks_in_files_of_their_own(base, tmp_path, capsys):
    checkpoint = tuned_checkpoint(tmp_path / "checkpoint", base, pet_type="bottleneck", adapter_length=4)
    assert tool("adapter", checkpoint, tmp_path / "adapter") == 0
    found, trained = (
        read_adapter(tmp_path / "adapter", MODEL),
        load_checkpoint(checkpoint, with_optimizer=False).weights,
    )
    model = found.model(MODEL)
    assert model.pet_config == PetConfig(pet_type="bottleneck", adapter_length=4)
    assert model.merged == model
    found.require_base(read_hugging_face(base, MODEL), "base")
    assert found.weights.keys() == trained.keys()
    for name, array in trained.items():
        np.testing.assert_array_equal(np.asarray(found.weights[name]), np.asarray(array))
    assert not supports(model, 16)
    assert supports(MODEL, 16)
    capsys.readouterr()
    for source in (checkpoint, tmp_path / "adapter"):
        assert tool("merge", source, tmp_path / "merged", "--base", base) == 2
        assert "no Hugging Face model has bottleneck adapters" in capsys.readouterr().err
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"adapter_length": "wide"}))
    assert tool("merge", tmp_path / "adapter", tmp_path / "merged", "--base", base) == 2
    assert "adapter_length: invalid value" in capsys.readouterr().err


def test_an_adapter_is_not_exported_as_a_model(base, tmp_path, capsys):
    checkpoint = tuned_checkpoint(tmp_path / "checkpoint", base)
    assert tool("export", checkpoint, tmp_path / "model") == 2
    assert "weights merge" in capsys.readouterr().err
