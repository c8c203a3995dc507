"""Ranks with directories of their own agree on order and length; ranks whose files differ are found out before they train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mindllm.data import Corpus, CorpusWriter, GPTDataset, load_tokenizer
from mindllm.data.gpt import DocumentOptions
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe
from mindllm.errors import RunFailed
from mindllm.train.job.data_agreement import require_same_data
from mindllm.train.job.ranks import Ranks

ROOT = Path(__file__).parents[2]
TEXTS = [f"def function_{number}(argument):\n    return argument * {number}\n" * 3 for number in range(120)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    save_tokenizer(train_byte_level_bpe(TEXTS, 300), directory / "tokenizer.json")
    write(directory, TEXTS)
    return directory


def write(directory, texts):
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    with CorpusWriter(directory / "corpus", tokenizer, append_eod=True, source_fingerprint=str(len(texts))) as writer:
        for text in texts:
            writer.append(tokenizer.encode(text))
            writer.end_text(len(text.encode()))


def dataset(directory):
    split = Corpus(str(directory / "corpus"), None).split("train", "90,10")
    return GPTDataset(split, 16, 7, DocumentOptions(split.corpus.eod_id, False, False, False))


@dataclass
class Party:
    """Ranks in threads that add numbers."""

    count: int
    values: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self):
        self.barrier = threading.Barrier(self.count)

    def rank(self, number):
        party = self

        class Rendezvous:
            def sum(self, values):
                party.values[number] = values
                party.barrier.wait(30)
                result = [sum(column) for column in zip(*party.values.values(), strict=True)]
                party.barrier.wait(30)
                return result

        return Ranks(number, self.count, Rendezvous())


def check(directories):
    party = Party(len(directories))
    datasets = [dataset(directory) for directory in directories]  # not in threads: CPython 3.11 parses in one at a time

    def one(number):
        try:
            require_same_data(datasets[number], party.rank(number))
        except RunFailed as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(directories)) as pool:
        return list(pool.map(one, range(len(directories))))


def copies(corpus, tmp_path, count):
    """Directories of their own, as nodes without a shared one have."""
    return [Path(shutil.copytree(corpus, tmp_path / f"node_{number}")) for number in range(count)]


def test_ranks_with_the_same_files_in_directories_of_their_own_agree(corpus, tmp_path):
    assert check(copies(corpus, tmp_path, 3)) == ["", "", ""]


def test_a_rank_with_fewer_documents_is_named_on_all_ranks(corpus, tmp_path):
    directories = copies(corpus, tmp_path, 3)
    for path in directories[1].glob("corpus*"):
        path.unlink()
    write(directories[1], TEXTS[:-20])
    messages = check(directories)
    assert len(set(messages)) == 1
    assert "rank 1 read different data than rank 0" in messages[0]


def test_a_rank_with_other_words_and_the_same_length_is_named(corpus, tmp_path):
    directories = copies(corpus, tmp_path, 2)
    path = directories[1] / "corpus.bin"
    tokens = np.fromfile(path, np.uint16)
    np.roll(tokens, 1).tofile(path)
    assert "rank 1 read different data" in check(directories)[0]


READER = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_data_agreement import dataset
from mindllm.data import BatchStream

directory, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
stream = BatchStream(dataset(directory), 8, rank=rank, rank_count=count)
for step in range(60):
    for row in stream.batch(step)["input_ids"]:
        print(step, *row)
print("length", stream.source.samples_per_epoch)
"""


def read(directory, rank, count):
    command = [
        sys.executable,
        "-c",
        READER.format(tests=str(Path(__file__).parent)),
        str(directory),
        str(rank),
        str(count),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(directory)}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=directory, env=environment, timeout=120, check=True
    )
    *rows, length = result.stdout.splitlines()
    return rows, length


def test_processes_in_directories_of_their_own_read_the_batches_of_one(corpus, tmp_path):
    """Several passes over the corpus, so that more than one order is drawn."""
    first, second, alone = copies(corpus, tmp_path, 3)
    parts = [read(first, 0, 2), read(second, 1, 2)]
    rows, length = read(alone, 0, 1)
    assert {part[1] for part in parts} == {length}
    for step in range(60):
        joined = [row for part, _ in parts for row in part[step * 4 : step * 4 + 4]]
        assert joined == rows[step * 8 : step * 8 + 8]
