"""What compiling a rank takes of this machine is estimated before it begins, and not far from what it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindllm import verify
from mindllm.compiled.rank.host_needs import compile_bytes
from mindllm.config import load_config, render_config
from mindllm.reduced_runs.model import reduce_model

FORMS = Path(verify.__file__).parent / "forms"
COMPILE = """
import resource, sys
from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import load_config
compile_rank(load_config(sys.argv[1]), 0)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
"""


@pytest.mark.parametrize(
    "form", ["latent_attention", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all_at_once", "experts"))]
)
def test_a_process_takes_what_was_estimated(form, tmp_path):
    small = reduce_model(load_config(FORMS / f"{form}.yaml"))
    path = tmp_path / "run.yaml"
    path.write_text(render_config(small), encoding="utf-8")
    result = subprocess.run([sys.executable, "-c", COMPILE, str(path)], capture_output=True, text=True, check=True)
    taken = int(result.stdout.split()[-1])
    assert taken <= compile_bytes(small) <= 2 * taken


def test_layers_of_all_stages_count_and_accumulation_steps_are_unrolled():
    accumulating, pipeline = FORMS / "accumulation.yaml", FORMS / "all_at_once.yaml"
    for form, change in (
        (accumulating, "--runner_config.gradient_accumulation_steps=4"),
        (pipeline, "--model.model_config.num_layers=16"),
    ):
        assert compile_bytes(load_config(form)) < compile_bytes(load_config(form, [change]))
