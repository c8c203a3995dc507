"""The name of a kept step: a changed key of the configuration gives another name, or the same graph."""

import pickle
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from mindllm.architecture.tuners import TUNERS
from mindllm.compiled.graph.file import load
from mindllm.config import load_config
from mindllm.config.compiled_keys import flat_keys
from mindllm.train.compile_cache import step_key

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # other values are of no valid type
FORMS = Path(__file__).resolve().parents[2] / "mindllm" / "verify" / "forms"
COMPILE = """
import os, pickle, sys
from functools import partial
from pathlib import Path
from mindllm.compiled.rank.compile_rank import prepare
from mindllm.compiled.rank.rank_group import Group, run_group
from mindllm.jobs.worker import fork
configs = pickle.loads(Path("configs.pickle").read_bytes())
prepare()
for name, config in configs.items():
    group = Group(config, [int(sys.argv[1])], True, 1, Path(name).absolute())
    fork(partial(run_group, group), Path(f"{name}.log").absolute())
for name in configs:
    _, status = os.wait()
    assert status == 0
"""


def changed(section, path):
    """The section with another value of one key, of the same type where it has one; nothing is validated."""
    key, *below = path
    value = getattr(section, key)
    return section.model_copy(update={key: changed(value, below) if below else other(value)})


def other(value):
    if isinstance(value, str) and value in TUNERS:  # what the tuner is decides what else counts
        return next(name for name in TUNERS if name != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return value[1:] if value else ("other",)
    return "other" if value is None else f"{value}-other"


def keys_without_effect(config):
    """The keys whose change leaves the name as it is: each was changed alone."""
    name = step_key(config)
    keys = [key for key, _ in flat_keys(config.model_dump(mode="json"))]
    paths = [key.split(".") for key in keys if key != "model.config.pet_config"]  # null, where there is no tuner
    return {".".join(path): path for path in paths if step_key(changed(config, path)) == name}


def compiled(directory, configs, rank):
    """The graphs of a rank by the names of the configurations, each compiled in a process of its own."""
    (directory / "configs.pickle").write_bytes(pickle.dumps(configs))
    subprocess.run([sys.executable, "-c", COMPILE, str(rank)], cwd=directory, check=True)
    return {name: contents(load(directory / name / str(rank) / "rank.graph")) for name in configs}


def contents(graph):
    """All that is computed, and all that it begins with; names and numbers that the compiler makes up are taken in order.

    It names a node after the variables that it stands for, in no order, and numbers others as threads come along.
    """
    nodes = [node for function in graph.functions for node in function.nodes]
    made_up = [
        *(item.name for function in graph.functions for item in (function, *function.inputs)),
        *(node.name for node in nodes),
        *(parameter.node for parameter in graph.parameters.values()),
    ]
    numbers = {repr(name): f"%{number}" for number, name in enumerate(made_up)}
    primals = [{key: value for key, value in node.primal.items() if key != "recompute_id"} for node in nodes]
    computed = [
        [text(getattr(replace(node, primal=primal), item.name), numbers) for item in fields(node)]
        for node, primal in zip(nodes, primals, strict=True)
    ]
    return computed, [(text(item, numbers), text(item.initial, numbers)) for item in graph.parameters.values()]


def text(value, numbers):
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return re.sub(r"'[^']*'", lambda name: numbers.get(name[0], name[0]), repr(value))


@pytest.fixture(autouse=True)
def _sources_are_the_same(monkeypatch):
    """Hashing the sources takes most of the time of a name, and 400 are made."""
    monkeypatch.setattr("mindllm.train.compile_cache.software_key", lambda: "")


@pytest.mark.parametrize(
    ("form", "rank"),
    [
        ("documents", 7),
        ("sampled_layers", 0),
        pytest.param("allocated_ranks", 1, marks=pytest.mark.slow),
        pytest.param("preferences", 0, marks=pytest.mark.slow),
        pytest.param("copies", 0, marks=pytest.mark.slow),
    ],
)
def test_a_changed_key_gives_another_name_or_the_same_graph(tmp_path, form, rank):
    config = load_config(FORMS / f"{form}.yaml")
    same = keys_without_effect(config)
    assert {"output_dir", "load_checkpoint", "lr_schedule.learning_rate", "processor.tokenizer.vocab_file"} <= set(same)
    all_at_once = config
    for path in same.values():
        all_at_once = changed(all_at_once, path)
    graphs = compiled(tmp_path, {"as_it_is": config, "changed": all_at_once}, rank)
    assert graphs["changed"] == graphs["as_it_is"]


@pytest.mark.parametrize(
    ("form", "key"),
    [
        ("copies", "micro_batch_interleave_num"),
        ("sampled_layers", "seed"),
        ("allocated_ranks", "runner_config.train_steps"),
        ("preferences", "preference.beta"),
        ("documents", "train_dataset.data_loader.config.reset_attention_mask"),
    ],
)
def test_what_is_a_constant_of_the_graph_is_in_the_name(form, key):
    assert key not in keys_without_effect(load_config(FORMS / f"{form}.yaml"))


@pytest.mark.parametrize("key", ["seed", "runner_config.train_steps"])
def test_another_seed_or_length_loads_the_kept_step(key):
    assert key in keys_without_effect(load_config(FORMS / "documents.yaml"))
