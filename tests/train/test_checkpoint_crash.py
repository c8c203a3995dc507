"""``kill -9`` at any moment: whatever was announced loads afterwards, nothing visible is broken, the next start cleans up."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mindllm.train.checkpoint import CheckpointStore, RankTensors, load_checkpoint
from mindllm.train.checkpoint import tensors as tensors_module
from mindllm.train.checkpoint.names import entries

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

REPOSITORY = Path(__file__).parents[2]

SAVER = """
import sys
import numpy as np
from mindllm.train.checkpoint import CheckpointStore, RankTensors

store = CheckpointStore(sys.argv[1], keep_checkpoint_max=3)
store.recover()
step = store.resume(True).step if store.newest() else 0
store.supersede_after(step)
while True:
    step += 1
    weights = {f"layers.{i}.w": np.full((40, 100), step, np.float32) for i in range(10)}
    store.save(step, {0: RankTensors(weights, {f"adam_m.{name}": array for name, array in weights.items()})}, {"step": step})
    print(step, flush=True)
    if step % 3 == 0:
        store.save(step, {0: RankTensors(weights, {})}, {"step": step})
"""


def tensors(version: int) -> dict[str, np.ndarray]:
    return {"w": np.full(10, version, np.float32)}


def save(store: CheckpointStore, step: int, version: int) -> None:
    store.save(step, {0: RankTensors(tensors(version), tensors(version))}, {"version": version})


class CrashAt:
    """Ends the process, with no cleaning up, just before the n-th call that changes or flushes the disk."""

    def __init__(self, moment: int) -> None:
        self.left = moment
        flush, write = os.fsync, tensors_module.HashingWriter.write
        os.fsync = lambda descriptor: (self.count(), flush(descriptor))
        tensors_module.HashingWriter.write = lambda writer, data: (self.count(), write(writer, data))
        sys.addaudithook(lambda event, _: self.count() if event.startswith(("os.", "open", "shutil.")) else None)

    def count(self) -> None:
        if self.left == 0:
            os._exit(9)
        self.left -= 1


def save_until_crash(directory: Path, moment: int) -> tuple[bool, set[str]]:
    """Forks a process that replaces step 2, then saves step 3; returns whether it crashed and what it announced."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        CrashAt(moment)
        store = CheckpointStore(directory, keep_checkpoint_max=2)
        save(store, 2, version=22)
        os.write(writer, b"replaced ")
        save(store, 3, version=3)
        os.write(writer, b"saved ")
        os._exit(0)
    os.close(writer)
    with open(reader) as announced:
        words = set(announced.read().split())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, words


def test_a_crash_before_every_single_system_call(tmp_path):
    crashed, moment = True, 0
    while crashed:
        directory = tmp_path / str(moment)
        store = CheckpointStore(directory, keep_checkpoint_max=2)
        save(store, 1, version=1)
        save(store, 2, version=2)
        crashed, announced = save_until_crash(directory, moment)
        versions = {
            entry.step: load_checkpoint(entry.path).state["version"] for entry in entries(directory)
        }  # before cleaning
        store.recover()
        versions |= {entry.step: load_checkpoint(entry.path).state["version"] for entry in entries(directory)}
        assert versions[2] in ({22} if "replaced" in announced else {2, 22})
        assert (versions[1] == 1) if 1 in versions else (versions[3] == 3)
        assert "saved" not in announced or versions[3] == 3
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
        moment += 1
    assert moment > 50
    assert announced == {"replaced", "saved"}


def test_thirty_kills_at_random_moments(tmp_path):
    directory, chance, announced = tmp_path / "checkpoint", random.Random(0), [0]
    for _ in range(30):
        command = [sys.executable, "-c", SAVER, str(directory)]
        saver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        first = saver.stdout.readline()
        time.sleep(chance.uniform(0, 0.06))
        saver.kill()
        rest, _ = saver.communicate()
        assert saver.returncode == -9, "the saver stopped by itself"
        found = [int(word) for word in (first + rest).split()]
        assert found[0] in (announced[-1] + 1, announced[-1] + 2)  # one may be whole on the disk and not yet announced
        announced += found
        assert_announced_checkpoints_load(directory, announced[1:])
    assert len(announced) > 30


def assert_announced_checkpoints_load(directory: Path, announced: list[int]) -> None:
    store = CheckpointStore(directory, keep_checkpoint_max=3)
    store.recover()
    loaded = {entry.step: load_checkpoint(entry.path) for entry in entries(directory)}
    newest = max(loaded)
    assert newest in (announced[-1], announced[-1] + 1)  # the one in the making may be whole
    assert loaded.keys() >= {step for step in announced if step > newest - 3}
    for step, checkpoint in loaded.items():
        assert checkpoint.state == {"step": step}
        assert all((array == step).all() for array in checkpoint.weights.values())
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]
