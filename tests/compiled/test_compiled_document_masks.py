"""On an accelerator, documents kept apart compile to the fused kernel with one whole mask that all layers share."""

import json
import os
import subprocess
import sys
from pathlib import Path

from mindllm.compiled.device.front_end import environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from mindllm.compiled.device import front_end
front_end.pretend_device(0, 1)
import json
from dataclasses import replace
import mindspore as ms
import numpy as np
from mindllm.compiled.graph.mind_ir import parse_mind_ir
from mindllm.config import ModelConfig
from mindllm.models import CausalLM, Kernels
ms.set_context(mode=ms.GRAPH_MODE)
sizes = {"vocab_size": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2, "seq_length": 32}
config = ModelConfig(**sizes, compute_dtype="float16")
model = CausalLM(config, replace(Kernels.choose(config, "Ascend"), document_masks=True))
ids, ones = ms.Tensor(np.zeros((2, 32), np.int32)), ms.Tensor(np.ones((2, 32), np.float32))
graph = parse_mind_ir(front_end.compile_cell(model, ids, ids, ones, ids, ids).mind_ir, 0)
masks = [node.inputs[6] for node in graph.find("FlashAttentionScore")]
shapes = {node.name: node.shapes for node in graph.nodes()}
print(json.dumps([[mask, shapes[mask]] for mask in masks]))
"""


def test_the_fused_kernel_reads_one_whole_mask():
    variables = {**os.environ, **environment(0, 1), "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    masks = json.loads(done.stdout.splitlines()[-1])
    assert len(masks) == 2
    assert masks[0] == masks[1]
    assert masks[0][1] == [[2, 1, 32, 32]]
