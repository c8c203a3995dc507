"""What a YAML of MindFormers converts to compiles: one written for the tests every time, others and all public ones when slow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

from mindllm.compiled.rank.host_needs import compile_bytes
from mindllm.config import RunConfig, load_config, render_config
from mindllm.errors import UserError
from mindllm.reduced_runs.mesh import reduced_meshes
from mindllm.reduced_runs.model import reduce_model
from mindllm.train.compile_cache import step_key
from tests.compile_each import BYTES_OF_A_RANK, read_results
from tests.mindformers.mindformers_files import LEGACY, MCORE, writer
from tests.mindformers.test_mindformers_experts import DEEPSEEK_V3, MIXTRAL, mcore
from tests.mindformers.test_mindformers_families import GLM3_6B, GPT2
from tests.public_yamls import converting_yamls

ROOT = Path(__file__).parents[2]
HOURS = 3600
EVERY_TIME = "mixtral"  # its experts and their balance are most of what a translation can get wrong
WRITTEN = {
    "mixtral": (LEGACY, MIXTRAL),
    "deepseek_v3": (MCORE, {**mcore({**DEEPSEEK_V3, "offset": 0}), "parallel_config.pipeline_stage": 1}),
    "chatglm3": (
        {**LEGACY, "model": {"model_config": GLM3_6B, "arch": {"type": "ChatGLM2ForConditionalGeneration"}}},
        {},
    ),
    "gpt2": (
        LEGACY,
        {
            **{f"model.model_config.{key}": value for key, value in GPT2.items()},
            "model.arch.type": "GPT2LMHeadModel",
            "use_parallel": False,
        },
    ),
}


def small_model(config: RunConfig) -> RunConfig:
    """Return a small model with the parallelism of a run: the first of its meshes, the largest first, that compiles in 3 GiB.

    Where none does, on the one that takes least.
    """
    found = list[RunConfig]()
    for mesh in reduced_meshes(config):
        with suppress(UserError):  # sizes that do not go together for another reason than the kind of the mesh
            found.append(reduce_model(config, real_dtype=True, mesh=mesh))
            if compile_bytes(found[-1]) < BYTES_OF_A_RANK * 3 // 4:
                return found[-1]
    return min(found, key=compile_bytes)


def not_compiled(directory: Path) -> dict[tuple[str, int], str]:
    """Compiles the YAMLs of a directory; by configuration and rank, what was wrong with those that do not compile."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "tests.compile_each", str(directory)], env=environment, check=True)
    results = read_results(directory)
    assert {result.config for result in results} == {path.stem for path in directory.glob("*.yaml")}
    return {(result.config, result.rank): result.error for result in results if result.error}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == EVERY_TIME else pytest.mark.slow) for name in WRITTEN]
)
def test_a_yaml_with_the_keys_of_a_public_one_compiles(name, tmp_path):
    tree, changes = WRITTEN[name]
    run = tmp_path / "run"
    run.mkdir()
    small = reduce_model(load_config(writer(tmp_path)(tree, changes)), real_dtype=True)
    (run / f"{name}.yaml").write_text(render_config(small), encoding="utf-8")
    assert not_compiled(run) == {}


@pytest.mark.slow
@pytest.mark.timeout(4 * HOURS)
def test_every_public_yaml_that_converts_compiles(tmp_path):
    """Those whose small models are the same step are compiled once."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, path in converting_yamls():
        small = small_model(load_config(path))
        names[key := step_key(small)].append(name)
        (tmp_path / f"{key}.yaml").write_text(render_config(small), encoding="utf-8")
    assert {(*names[key], rank): error for (key, rank), error in not_compiled(tmp_path).items()} == {}
