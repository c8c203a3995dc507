"""The command line that makes corpora: contents, order, workers, up-to-dateness, mistakes, interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mindllm.data import Corpus, load_tokenizer
from mindllm.data.corpus import corpus_files
from mindllm.data.preprocess.resume import LOGS, ResumableWriter, SavedProgress
from mindllm.data.tokenizers.sentencepiece_tokenizer import save_tokenizer, train_byte_level_bpe

REPOSITORY = Path(__file__).parents[2]
FILES = {
    "a.py": "def one():\n    return 1\n" * 30,
    "sub/b.py": "# été\nvalue = 'two'\n" * 20,
    "sub/c.txt": "three <|endoftext|> and more\n",
    "sub/tests/test_d.py": "assert True\n",
    "empty.py": "",
    ".hidden/e.py": "hidden = 1\n",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree") / "src"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "link.py").symlink_to(root / "a.py")
    return root


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_byte_level_bpe(FILES.values(), 285), path)
    return path


def command(*arguments):
    return [sys.executable, "-m", "mindllm.main", "data", *map(str, arguments)]


def environment():
    return dict(os.environ, PYTHONPATH=str(REPOSITORY))


def run(*arguments, expect=0):
    done = subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if expect == 0 else done.stderr


def texts_of(prefix, tokenizer_path):
    tokenizer = load_tokenizer(tokenizer_path)
    return [tokenizer.decode(document[:-1].tolist()) for document in Corpus(prefix, tokenizer).dataset]


def test_special_tokens_that_the_text_may_contain(tree, tokenizer_path, tmp_path):
    made = ("--tokenizer", tokenizer_path, tree / "sub/c.txt", "--output-prefix")
    said = run(*made, tmp_path / "words")
    assert "1 name of special tokens in the text encoded as words: <|endoftext|> 1" in said
    summary = json.loads(run(*made, tmp_path / "tokens", "--json", "--allowed-special-tokens", "<|endoftext|>"))
    assert summary["spelled_out"] == {}
    assert (Corpus(tmp_path / "tokens").dataset.tokens == 0).sum() == 2
    assert "is not a special token" in run(*made, tmp_path / "none", "--allowed-special-tokens", "<eot>", expect=2)


def test_tree_to_corpus_and_again(tree, tokenizer_path, tmp_path):
    made = (
        "--tokenizer",
        tokenizer_path,
        "--output-prefix",
        tmp_path / "c",
        tree,
        "--include",
        "*.py",
        "--exclude",
        "tests",
    )
    summary = json.loads(run(*made, "--keep-order", "--json"))
    assert texts_of(tmp_path / "c", tokenizer_path) == [FILES["a.py"], FILES["sub/b.py"]]
    corpus = Corpus(tmp_path / "c")
    assert summary["documents"] == 2
    assert summary["tokens"] == corpus.dataset.token_count
    assert summary["bytes"] == len((FILES["a.py"] + FILES["sub/b.py"]).encode())
    assert summary["bytes_per_token"] == summary["bytes"] / summary["tokens"]
    assert (summary["empty"], summary["invalid_utf8"], summary["up_to_date"]) == (1, 0, False)
    assert [Path(name) for name in summary["files"]] == corpus_files(tmp_path / "c")
    assert all(document[-1] == corpus.eod_id for document in corpus.dataset)

    before = [path.stat().st_mtime_ns for path in corpus_files(tmp_path / "c")]
    assert "nothing to do" in run(*made, "--keep-order")
    assert [path.stat().st_mtime_ns for path in corpus_files(tmp_path / "c")] == before
    assert "--overwrite" in run(*made, "--keep-order", "--no-append-eod", expect=2)
    run(*made, "--no-append-eod", "--overwrite")
    assert Corpus(tmp_path / "c").eod_id is None
    described = json.loads(run("--info", tmp_path / "c", "--json"))
    assert (described["documents"], described["eod_id"], described["dtype"]) == (2, None, "uint16")
    assert "tokenizer.json" in run("--info", tmp_path / "c")


def test_order_is_shuffled_by_seed_alone(tree, tokenizer_path, tmp_path):
    made = ("--tokenizer", tokenizer_path, tree, "--json")
    orders = {}
    for seed in (1, 2, 3):
        run(*made, "--output-prefix", tmp_path / str(seed), "--shuffle-seed", seed)
        orders[seed] = texts_of(tmp_path / str(seed), tokenizer_path)
    assert len({tuple(order) for order in orders.values()}) > 1
    assert {tuple(sorted(order)) for order in orders.values()} == {tuple(sorted(orders[1]))}
    run(*made, "--output-prefix", tmp_path / "again", "--shuffle-seed", 3)
    assert texts_of(tmp_path / "again", tokenizer_path) == orders[3]


def test_tokenizer_is_trained_when_it_is_missing(tree, tmp_path):
    made = (tree, "--train-tokenizer", 280, "--tokenizer", tmp_path / "t.json", "--output-prefix", tmp_path / "c")
    assert json.loads(run(*made, "--json"))["vocab_size"] == 280
    trained = (tmp_path / "t.json").read_bytes()
    assert "nothing to do" in run(*made)
    assert (tmp_path / "t.json").read_bytes() == trained
    assert "--train-tokenizer asks for 281" in run(tree, "--train-tokenizer", 281, *made[3:], expect=2)


def test_standard_library_is_found_without_its_tests():
    from mindllm.data.preprocess.sources import python_standard_library

    sources = python_standard_library()
    names = {source.name.partition("/")[2] for source in sources}
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(name.split("/")) for name in names)
    assert 8e6 < sum(source.size for source in sources) < 20e6


def test_bytes_that_are_no_utf8_are_replaced_and_told(tmp_path, tokenizer_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    told = run(tmp_path / "latin.txt", "--tokenizer", tokenizer_path, "--output-prefix", tmp_path / "c")
    assert "1 files are not UTF-8" in told
    assert "latin.txt" in told
    assert texts_of(tmp_path / "c", tokenizer_path) == ["caf\ufffd\n"]
    assert Corpus(tmp_path / "c").meta.bytes == len("caf\ufffd\n".encode())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "--tokenizer", "TOKENIZER", "--output-prefix", "c"], "nowhere: no such file"),
        (["TREE", "--tokenizer", "none.json", "--output-prefix", "c"], "none.json: no such tokenizer"),
        (["TREE", "--tokenizer", "TOKENIZER"], "--output-prefix is missing"),
        (["TREE", "--output-prefix", "c"], "--tokenizer is missing"),
        (["--tokenizer", "TOKENIZER", "--output-prefix", "c"], "input is missing"),
        (["TREE", "--include", "*.rs", "--tokenizer", "TOKENIZER", "--output-prefix", "c"], "'*.rs' matches no file"),
        (["TREE/empty.py", "--tokenizer", "TOKENIZER", "--output-prefix", "c"], "files are empty"),
        (["TREE", "--tokenizer", "new.txt", "--train-tokenizer", "280", "--output-prefix", "c"], "trained as .json"),
        (["TREE", "--tokenizer", "new.model", "--train-tokenizer", "9", "--output-prefix", "c"], "ask for at least"),
        (["TREE", "--tokenizer", "new.model", "--train-tokenizer", "9999", "--output-prefix", "c"], "a value <="),
        (["TREE", "--tokenizer", "new.json", "--train-tokenizer", "9999", "--output-prefix", "c"], "give only"),
        (["TREE", "--tokenizer", "TOKENIZER", "--output-prefix", "TOKENIZER/c"], "tokenizer.json"),
        (["--info", "nothing"], "nothing.idx: no such file"),
        (["--workers", "0"], "must be an integer of at least 1 (value 0)"),
        (["--unknown"], "--unknown: unknown option"),
    ],
)
def test_mistakes_end_with_2_and_leave_nothing(tree, tokenizer_path, arguments, says):
    given = [text.replace("TREE", str(tree)).replace("TOKENIZER", str(tokenizer_path)) for text in arguments]
    assert says in run(*given, expect=2)
    assert list(Path.cwd().iterdir()) == []


def test_help_has_an_example():
    assert "--python-stdlib --train-tokenizer" in run("--help")


@pytest.fixture(scope="module")
def much_text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("much")
    words = np.random.RandomState(0).randint(97, 123, size=12_000_000, dtype=np.uint8)
    words[::7] = 32
    words[::70] = 10
    for number in range(48):  # many documents: output grows long before the end
        words[number::48].tofile(directory / f"{number}.txt")
    return directory


def start(much_text, tokenizer_path, out, workers, grown="c.partial/tokens"):
    """Starts encoding in a process group of its own; returns when its files have begun to grow."""
    arguments = command(much_text, "--tokenizer", tokenizer_path, "--output-prefix", out / "c", "--workers", workers)
    process = subprocess.Popen(
        arguments,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (out / grown).exists() or not (out / grown).stat().st_size:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def group_is_gone(process):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("workers", "kind", "whole_group"),
    [(2, "SIGINT", True), (2, "SIGTERM", False), (1, "SIGINT", True), (1, "SIGHUP", False)],
)
def test_interruption_leaves_no_corpus_and_no_process(much_text, tokenizer_path, tmp_path, workers, kind, whole_group):
    out = tmp_path / "out"
    out.mkdir()
    process = start(much_text, tokenizer_path, out, workers)
    (os.killpg if whole_group else os.kill)(process.pid, getattr(signal, kind))
    _, errors = process.communicate(timeout=60)
    word = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}[kind]
    assert (process.returncode, errors.strip()) == (128 + getattr(signal, kind), word)
    assert [path.name for path in out.iterdir()] in ([], ["c.partial"])
    assert group_is_gone(process)


@pytest.mark.parametrize(
    "change", [{"sizes": {"../../mine": 3}}, {"sizes": 5}, {"pieces": "x"}, {"tokens": -1}, {"invalid": None}, []]
)
def test_damaged_progress_of_an_unfinished_corpus_is_not_used(change, tokenizer_path, tmp_path):
    """It once ended every later start with a traceback; sizes under other names cut off other files."""
    (tmp_path / "mine").write_text("years of work")
    writer = ResumableWriter(
        tmp_path / "a" / "c", load_tokenizer(tokenizer_path), append_eod=True, source_fingerprint="f"
    )
    whole = SavedProgress("f", 1, dict.fromkeys(LOGS, 0), 0, 0, 0, 0, ())
    with writer:
        for name in LOGS:
            (writer.work / name).touch()
        (writer.work / "progress.json").write_text(json.dumps(asdict(whole)))
        assert writer._go_on()
        tree = {**asdict(whole), **change} if change else change
        (writer.work / "progress.json").write_text(json.dumps(tree))
        assert not writer._go_on()
    assert (tmp_path / "mine").read_text() == "years of work"


def test_killed_and_started_again_gives_the_corpus_of_an_uninterrupted_run(much_text, tokenizer_path, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for workers in (2, 1):
        process = start(much_text, tokenizer_path, out, workers, grown="c.partial/progress.json")
        process.kill()
        process.wait()
        process.stderr.close()
        assert group_is_gone(process), "the workers live on"
        assert not (out / "c.idx").exists()
    done = json.loads((out / "c.partial/progress.json").read_text())
    with open(out / "c.partial/tokens", "ab") as file:
        file.write(b"what was not saved")
    made = (much_text, "--tokenizer", tokenizer_path, "--json")
    again = json.loads(run(*made, "--output-prefix", out / "c"))
    whole = json.loads(run(*made, "--output-prefix", tmp_path / "whole"))
    assert again["resumed_tokens"] == done["tokens"] > 0
    assert whole["resumed_tokens"] == 0
    assert sorted(path.name for path in out.glob("c.*")) == ["c.bin", "c.bytes.npy", "c.idx", "c.meta.json"]
    for left, right in zip(corpus_files(out / "c"), corpus_files(tmp_path / "whole"), strict=True):
        assert left.read_bytes() == right.read_bytes(), left
