"""Decoding with projections in codes: the kernel against the one of floats, and a directory in codes from prompt to tokens."""

import ctypes

import numpy as np
import pytest
from tiny import options
from tiny_quantized import MODEL, save

from mindllm.config import RunConfig, read_model_config
from mindllm.families import with_file_names
from mindllm.generate import load
from mindllm.generate.generator import Generator
from mindllm.generate.graphs.library import library
from mindllm.models import build_model
from mindllm.models.weights import assign, quantized_parameters, trained_weights
from mindllm.quantize import Codes, code_values, quantize
from mindllm.weight_files import read_hugging_face

needs_kernels = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, CAPACITY = 64, 4, 2, 16, 96, 8
MATRICES = {
    "wq": (HEADS * WIDTH, HIDDEN),
    "wk": (KV_HEADS * WIDTH, HIDDEN),
    "wv": (KV_HEADS * WIDTH, HIDDEN),
    "wo": (HIDDEN, HEADS * WIDTH),
    "w1": (INNER, HIDDEN),
    "w3": (INNER, HIDDEN),
    "w2": (HIDDEN, INNER),
}
NOTHING, NO_PLACES = np.zeros(1, np.float32), np.zeros(1, np.int32)


def decode_layer(x, position, matrices, further=()):
    """The layer of ``decode.cc`` on arrays; ``further`` inputs are those of codes."""
    random = np.random.default_rng(1)
    batch = len(x)
    rows = random.normal(0, 1, (2, batch * KV_HEADS * CAPACITY, WIDTH)).astype(np.float32)
    turns = random.normal(0, 1, (2, batch, WIDTH)).astype(np.float32)
    norms = random.normal(1, 0.1, (2, HIDDEN)).astype(np.float32)
    numbers = np.array([1e-5, 0.25, 0, 0], np.float32)
    positions = np.full(batch, position, np.int32)
    wq, wk, wv, wo, w1, w3, w2 = matrices
    result = np.zeros_like(x)
    arrays = [x, *turns, positions, numbers, norms[0], wq, wk, wv, wo, norms[1], w1, w3, w2, *rows]
    arrays += [NOTHING] * 6 + list(further) + [result]
    pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    dimensions = (ctypes.c_int * len(arrays))(*[array.ndim for array in arrays])
    shapes = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
    table = (ctypes.c_void_p * len(arrays))(*[ctypes.addressof(shape) for shape in shapes])
    function = ctypes.CDLL(str(library())).decode_layer
    assert function(len(arrays), pointers, dimensions, table, None, None, None) == 0
    return result


@needs_kernels
@pytest.mark.parametrize("code", ["uint4", "uint8", "int8", "nf4", "fp4", "e4m3"])
@pytest.mark.parametrize("group", [16, 32])
def test_a_layer_in_codes_is_that_of_their_values(code, group):
    random = np.random.default_rng(0)
    codes = {}
    for name, shape in MATRICES.items():
        found = quantize(random.normal(0, 0.2, shape).astype(np.float32), code, group)
        if code == "uint4":
            columns = random.permutation(shape[1]).astype(np.int32)
            found = Codes(found.code, found.packed, found.scales, found.zeros, columns)
        codes[name] = found
    table = code_values(code)
    further = [np.zeros(len(table) + 1, np.float32) if code in ("uint4", "uint8") else table]
    for found in codes.values():
        held = found.tensors()
        further += [held["scales"], held.get("zeros", NOTHING), held.get("columns", NO_PLACES)]
    for batch in (1, 5):
        x = random.normal(0, 1, (batch, HIDDEN)).astype(np.float32)
        values = [np.ascontiguousarray(found.values()) for found in codes.values()]
        wanted = decode_layer(x, 5, values)
        packed = [np.ascontiguousarray(found.packed) for found in codes.values()]
        result = decode_layer(x, 5, packed, [np.ascontiguousarray(array) for array in further])
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)
        alone = decode_layer(x[:1].copy(), 5, packed, [np.ascontiguousarray(array) for array in further])
        if batch == 1:
            np.testing.assert_array_equal(alone, result)


@needs_kernels
def test_a_directory_in_codes_is_continued_as_its_values_are(tmp_path):
    save(tmp_path / "base", "act-order")
    values = {name: np.asarray(item) for name, item in read_hugging_face(tmp_path / "base", MODEL).items()}
    keys = {"load_checkpoint": str(tmp_path / "base"), "use_parallel": False, "context": {"device_target": "CPU"}}
    described = read_model_config(tmp_path / "base").model_copy(update={"seq_length": 64, "eos_token_id": 96})
    keys["model"] = {"model_config": described.model_dump(exclude_unset=True)}
    run = RunConfig.model_validate({"run_mode": "predict", **keys})
    with_file_names(run.model.config)
    codes = load.load_generator(run, None, load.find_weights(run, on_host=False))
    assert len(quantized_parameters(codes.model)) == 2 * 7 * 4
    assert not trained_weights(codes.model)
    plain = build_model(described.base)
    assign(trained_weights(plain), values)
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5]]
    wanted = Generator(plain, described, native=False).generate(prompts, options(12))
    in_graphs = [Generator(codes.model, codes.model_config, native=native) for native in (True, False)]
    for generator in (*in_graphs, load.load_generator(run, None)):
        found = generator.generate(prompts, options(12))
        assert [item.tokens for item in found] == [item.tokens for item in wanted]
