"""Tasks that compile graphs which predict from projections in codes on Ascend, without a device or in MindSpore's dry run."""

import os
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindllm.compiled.device import front_end
from mindllm.config import ModelConfig
from mindllm.families import with_file_names
from mindllm.finetune.transform import build_tuned_model
from mindllm.generate.graphs.cache import CachedDecoder
from mindllm.generate.graphs.quantized_linear import use_quantized_products
from mindllm.models import Kernels

BATCH, PROMPT, CAPACITY, ROWS, GROUP = 2, 16, 128, 16, 32
HIDDEN, WIDTH, KEYS = 64, 128, 32
MODEL = {
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 2,
    "intermediate_size": WIDTH,
    "seq_length": CAPACITY,
    "compute_dtype": "bfloat16",
}
IN_FLOATS = "feed_forward.w3"
KINDS = {
    "uint4": {"quant_method": "gptq", "group_size": GROUP, "act_order": True},
    "uint8": {"quant_method": "hqq", "group_size": GROUP},
    "int8": {"quant_method": "bitsandbytes", "group_size": 0},
    "nf4": {"quant_method": "bitsandbytes", "group_size": 64},
}


def predicting_model(code, **changes):
    """The decoder with its head, as ``run_mode: predict`` has it on Ascend, and what it was built from."""
    section = {"code": code, "modules_to_not_convert": [IN_FLOATS], **KINDS[code], **changes}
    model = with_file_names(ModelConfig(**MODEL, quantization_config=section)).frozen
    lm = build_tuned_model(model, "Ascend")
    use_quantized_products(lm, model, Kernels.choose(model, "Ascend"))
    return lm, model


def decoder(code):
    lm, model = predicting_model(code)
    return CachedDecoder(lm, model, Kernels.choose(model, "Ascend"), BATCH, CAPACITY).set_train(False)


def tokens(width):
    """Inputs of the decoder for so many tokens of each sequence."""
    ids = Tensor(np.zeros((BATCH, width), np.int32))
    return ids, ids, Tensor(np.zeros(BATCH, np.int32))


class SplitProducts(nn.Cell):
    """Projections on two devices: ``wq`` and ``w1`` by rows, ``wo`` and ``w2`` by groups of columns."""

    def __init__(self, layer):
        super().__init__(auto_prefix=False)
        self.wq, self.wo = layer.attention.wq, layer.attention.wo
        self.w1, self.w2 = layer.feed_forward.w1, layer.feed_forward.w2
        for cell in (self.wq, self.w1):
            cell.matmul.shard(((1, 1), *[(1, 2)] * 3))
        for cell in (self.wo, self.w2):
            cell.matmul.shard(((1, 2), *[(2, 1)] * 3))
        self.w1.activation.silu.shard(((1, 2),))

    def construct(self, x):
        return self.wo(self.wq(x)), self.w2(self.w1(x))


def compile_all(directory):
    """Write MindIR of the front end into a directory."""
    front_end.pretend_device(0, 2)
    directory = Path(directory)
    os.chdir(directory)
    ms.set_context(mode=ms.GRAPH_MODE)
    for code in KINDS:
        graph = front_end.compile_cell(decoder(code), *tokens(PROMPT if code == "uint4" else 1))
        (directory / code).write_bytes(graph.mind_ir)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2, global_rank=0, full_batch=True)
    lm, _ = predicting_model("uint4", act_order=False)
    split = SplitProducts(lm.model.layers[0]).set_train(False)
    graph = front_end.compile_cell(split, Tensor(np.zeros((ROWS, HIDDEN)), ms.bfloat16))
    (directory / "split").write_bytes(graph.mind_ir)


def simulate(code, directory):
    """Run a token in MindSpore's dry run."""
    os.chdir(directory)
    from mindspore.communication import init
    from mindspore.communication._comm_helper import GlobalComm

    from mindllm.compiled.device.callback_thread import calm_callback_thread
    from mindllm.compiled.simulation.simulate_rank import KERNEL_BY_KERNEL, PIPELINED_THREADS, UNLIMITED_MEMORY

    GlobalComm.CHECK_ENVS = False
    ms.set_context(device_target="Ascend", max_device_memory=UNLIMITED_MEMORY, mode=ms.GRAPH_MODE)
    ms.set_context(jit_config={"jit_level": KERNEL_BY_KERNEL})
    ms.runtime.dispatch_threads_num(PIPELINED_THREADS)
    init()
    calm_callback_thread(Path(ms.__file__).parent)
    decoder(code)(*tokens(1))
    ms.runtime.synchronize()
