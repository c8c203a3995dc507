"""Section ``train_dataset``: kinds of data loaders, blends, columns that keep documents apart."""

import numpy as np
import pytest

from mindllm.config.dataset import IndexedDataConfig, IndexedDataLoader, InstructionDataLoader, RowsDataLoader
from mindllm.files import unexpanded
from mindllm.parallel.context import input_columns
from mindllm.train.engine.columns import with_document_columns

LOADER = "train_dataset.data_loader"
PATH = f"--{LOADER}.config.data_path"
CHATS = [f"--{LOADER}.type=CommonDataLoader", "--processor.tokenizer.vocab_file=t.json"]
TWO_DEVICES = ["--use_parallel", "--parallel_config.data_parallel=2", "--context.device_target=Ascend"]


@pytest.mark.parametrize(
    ("given", "paths", "weights"),
    [
        ("a", ("a",), None),
        ("[a]", ("a",), None),
        ("[a, b]", ("a", "b"), None),
        ("[0.3, a, 0.7, b]", ("a", "b"), (0.3, 0.7)),
        ("[30, a, 70, b]", ("a", "b"), (30.0, 70.0)),
        ("['0.3', a, '0.7', b]", ("a", "b"), (0.3, 0.7)),
        ("[1, a]", ("a",), (1.0,)),
    ],
)
def test_paths_and_weights(load, given, paths, weights):
    section = load(f"{PATH}={given}").train_dataset.data_loader.config
    assert isinstance(section, IndexedDataConfig)
    assert (section.data_paths, section.weights) == (paths, weights)


@pytest.mark.parametrize("given", ["[0.3, a, b]", "[a, 0.3, b, 0.7]", "[0.3, 0.7, a, b]", "[0.3, a, 0.7]"])
def test_weights_and_paths_come_in_turn(refused, given):
    assert "weight and prefix in turn, such as [0.3, a, 0.7, b]" in refused(f"{PATH}={given}")


@pytest.mark.parametrize("given", ["[0, a, 1, b]", "[-1, a, 1, b]"])
def test_weights_are_positive(refused, given):
    assert "greater than 0" in refused(f"{PATH}={given}")


def test_kinds_of_loaders(load):
    assert isinstance(load().train_dataset.data_loader, IndexedDataLoader)
    assert isinstance(load(f"--{LOADER}.type=MindDataset").train_dataset.data_loader, RowsDataLoader)
    loader = load(*CHATS, f"--{LOADER}.config.packing").train_dataset.data_loader
    assert isinstance(loader, InstructionDataLoader)
    assert loader.config.split_weights == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ([f"--{LOADER}.type=CommonDataloader"], f"{LOADER}.type", "did you mean 'CommonDataLoader'"),
        ([CHATS[0]], "processor.tokenizer.vocab_file", "conversations need a tokenizer"),
        (
            [CHATS[0], "--load_checkpoint=~/models/base"],
            "processor.tokenizer.vocab_file",
            "load_checkpoint, which may bring one, does not exist; ~ is not expanded in a YAML: write the path itself",
        ),
        (
            ["--output_dir=~/output"],
            "output_dir",
            "would be made by this very name (value ~/output); ~ is not expanded",
        ),
        (["--output_dir=${HOME}/out"], "output_dir", "; ${HOME} is not expanded in a YAML: write the path itself"),
        ([*CHATS, f"--{LOADER}.config.handler=alpacca"], f"{LOADER}.config.handler", "did you mean 'alpaca'"),
        (
            [*CHATS, f"--{LOADER}.config.reset_position_ids"],
            f"{LOADER}.config.reset_position_ids",
            "not used by this type",
        ),
        ([*CHATS, PATH + "="], f"{LOADER}.config.data_path", "file of conversations"),
    ],
)
def test_refused_data(refused, options, key, words):
    message = refused(*options)
    assert f": {key}: " in message
    assert words in message


@pytest.mark.parametrize("path", ["out~1/run", "a/~/b", "output", "cost in $", "/data/x"])
def test_paths_that_are_their_names(path, load):
    assert (unexpanded(path), load(f"--output_dir={path}").output_dir) == ("", path)


@pytest.mark.parametrize("target", ["CPU", "Ascend"])
def test_several_devices_may_pack(load, target):
    config = load(*TWO_DEVICES[:2], f"--context.device_target={target}", *CHATS, f"--{LOADER}.config.packing")
    columns = input_columns(config)
    assert columns == ("input_ids", "labels", "loss_mask", "segment_starts", "position_ids")
    batch = {name: np.full((2, 4), number, np.int32) for number, name in enumerate(columns[:3])}
    assert list(with_document_columns(batch, columns)) == list(columns)
    assert with_document_columns(batch, columns)["segment_starts"].tolist() == [[0] * 4] * 2
    assert with_document_columns(batch, columns)["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


BOTH = ("segment_starts", "position_ids")


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ([], ()),
        ([f"--{LOADER}.config.eod_mask_loss"], ()),
        ([f"--{LOADER}.config.reset_attention_mask"], BOTH[:1]),
        ([f"--{LOADER}.config.reset_position_ids"], BOTH[1:]),
        ([f"--{LOADER}.config.reset_attention_mask", f"--{LOADER}.config.reset_position_ids"], BOTH),
        (CHATS, ()),
        ([*CHATS, f"--{LOADER}.config.packing"], BOTH),
        ([*CHATS, f"--{LOADER}.config.packing=joined"], ()),
    ],
)
def test_documents_are_kept_apart_only_where_it_is_asked_for(load, options, columns):
    assert load(*options).train_dataset.document_columns == columns
