"""Graphs of prediction are loaded on a second start, say the same, and are compiled anew where anything differs."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import mindspore
import pytest
from tiny import tiny_config

from mindllm.config import RunConfig
from mindllm.generate.graphs import kept as module
from mindllm.generate.graphs.kept import KeptGraphs
from mindllm.jobs.store import Store
from mindllm.train import compile_cache

SCRIPT = """
import json
from tiny import options, tiny_config, tiny_model
from mindllm.config import RunConfig
from mindllm.generate.generator import Generator
from mindllm.generate.graphs.kept import KeptGraphs
import mindspore as ms
ms.set_context(mode=ms.GRAPH_MODE)
config = tiny_config()
keys = {"run_mode": "predict", "use_parallel": False, "context": {"device_target": "CPU"}}
run = RunConfig.model_validate({**keys, "model": {"model_config": config.model_dump(exclude_unset=True)}})
kept = KeptGraphs(run, config)
(result,) = Generator(tiny_model(config), config, native=False, kept=kept).generate([[5, 17, 3]], options(6))
print(json.dumps(result.tokens))
"""
LOADED = "Use the compilation cache"  # what MindSpore says of each graph


@pytest.fixture
def start(tmp_path):
    """Starts a process that predicts; returns its tokens and how many graphs it loaded."""
    (tmp_path / "predict.py").write_text(SCRIPT)

    def run():
        here = Path(__file__).resolve().parent
        paths = {"PYTHONPATH": f"{here.parents[1]}:{here}", "XDG_CACHE_HOME": str(tmp_path / "cache"), "GLOG_v": "1"}
        command = [sys.executable, "predict.py"]
        environment = {**os.environ, **paths}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line for line in done.stdout.splitlines() if line.startswith("[") and line.endswith("]")]
        return json.loads(lines[-1]), (done.stdout + done.stderr).count(LOADED)

    return run


def kept(tmp_path):
    return sorted((tmp_path / "cache/mindllm/graphs").glob("*"))


def test_a_second_start_loads_both_graphs_and_says_the_same(start, tmp_path):
    tokens, loaded = start()
    assert loaded == 0
    (directory,) = kept(tmp_path)
    assert directory.name.startswith("graph-"), "nothing unfinished is left"
    assert start() == (tokens, 2)

    for damaged in (tmp_path / "cache").rglob("*.mindir"):
        damaged.chmod(0o600)
        damaged.write_bytes(damaged.read_bytes()[:100])
    assert start() == (tokens, 0), "what is damaged is compiled anew"


def name_of(tmp_path, monkeypatch, *shape, context=None, **changes):
    """The directory in which graphs would be kept; None where they are not."""
    names = []
    monkeypatch.setattr(module, "store_graphs", lambda store, key: names.append(key) or nullcontext())
    config = tiny_config(**changes)
    keys = {"run_mode": "predict", "use_parallel": False, "context": {"device_target": "CPU", **(context or {})}}
    run = RunConfig.model_validate({**keys, "model": {"model_config": config.model_dump(exclude_unset=True)}})
    kept = KeptGraphs(run, config)
    for _ in range(2):  # the second is compiled as ever: MindSpore stays with its first directory
        with kept.compiling(*(shape or (1, 128, 16))):
            pass
    assert len(names) <= 1
    return names[0] if names else None


def test_what_graphs_depend_on_is_in_their_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [__file__])

    def name(*shape, **keys):
        return name_of(tmp_path, monkeypatch, *shape, **keys)

    one = name()
    assert one == name()
    others = [
        name(1, 128, 32),
        name(1, 256, 16),
        name(2, 128, 16),
        name(rms_norm_eps=1e-3),
        name(compute_dtype="bfloat16"),
    ]
    others.append(name(context={"jit_config": {"jit_level": "O1"}}))
    monkeypatch.setattr(module, "source_digest", lambda: "changed")
    others.append(name())
    monkeypatch.setattr(module.ms, "__version__", "2.11.0")
    others.append(name())
    assert len({one, *others}) == 1 + len(others)
    assert name(context={"compile_cache": False}) is None
    assert name(context={"save_graphs": True}) is None
    monkeypatch.setenv("MINDLLM_GRAPHS", "0")
    assert name() is None


def test_the_cache_is_bounded_and_finished_or_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(mindspore, "set_context", lambda **keys: None)
    store = Store(tmp_path, "graph-", max_entries=2)
    for number in range(4):
        with compile_cache.store_graphs(store, f"{number}"):
            pass
        os.utime(tmp_path / f"graph-{number}", (number, number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph-2", "graph-3"]
    abandoned, busy = tmp_path / ".graph-8.1", tmp_path / ".graph-9.2"
    abandoned.mkdir()
    busy.mkdir()
    os.utime(abandoned, (0, 0))
    with pytest.raises(ValueError, match="failed"), compile_cache.store_graphs(store, "7"):
        raise ValueError("compiling failed")
    assert not list(tmp_path.glob("*graph-7*"))
    with compile_cache.store_graphs(store, "2"):  # it is used, so another one goes
        pass
    with compile_cache.store_graphs(store, "5"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [busy.name, "graph-2", "graph-5"]
