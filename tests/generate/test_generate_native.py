"""The C++ kernels give the logits of the compiled cells, the same for any batch; where they cannot be built, the cells decode."""

import ctypes
import logging
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor
from tiny import SHAPES, options, tiny_config, tiny_model

from mindllm.generate.generator import Generator
from mindllm.generate.graphs import library as native
from mindllm.generate.graphs.library import supports
from mindllm.generate.session import Session
from mindllm.models import Kernels

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hugging_face import ROPE_SCALINGS

LENGTHS = [5, 1, 19, 8]


@pytest.fixture(autouse=True)
def _needs_a_compiler():
    if native.library() is None:
        pytest.skip("there is no g++")


@pytest.fixture
def _builds_anew(monkeypatch, tmp_path):
    """An empty cache, for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def decoded(model, config, batch, use_native, steps=4):
    """Logits ``[steps, batch, vocab]`` of fixed tokens after prompts of unequal length."""
    session = Session(model, config, Kernels.choose(config, "CPU"), batch, config.seq_length, use_native)
    assert (session._native is not None) == use_native
    random = np.random.default_rng(0)
    rows = [random.integers(0, config.vocab_size, LENGTHS[row % 4] + steps) for row in range(16)][:batch]
    lengths = np.array([len(row) - steps for row in rows])
    session.prefill([row[:length] for row, length in zip(rows, lengths, strict=True)])
    return np.stack(
        [
            session.decode([row[at] for row, at in zip(rows, lengths + step, strict=True)], lengths + step).copy()
            for step in range(steps)
        ]
    )


@pytest.mark.parametrize(
    ("shape", "scaling"), [("multi-head", None), ("grouped", None), ("grouped", "linear"), ("tied", "llama3")]
)
def test_logits_equal_those_of_the_cells(shape, scaling):
    ours = ROPE_SCALINGS[scaling][0] if scaling else None
    config = tiny_config(**SHAPES[shape], rope_scaling=ours)
    model = tiny_model(config)
    np.testing.assert_allclose(
        decoded(model, config, 4, use_native=True), decoded(model, config, 4, use_native=False), rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"qkv_has_bias": True, "attn_proj_has_bias": True, "partial_rotary_factor": 0.5},
        {"qk_layernorm": True, "qkv_has_bias": True},
        {"layernorm_zero_centered_gamma": True, "hidden_act": "gelu_tanh", "scale_embeddings": True, "qk_layernorm": True,
         "query_pre_attn_scalar": 7.0},
    ],
    ids=["biases, half of the heads turned", "norms of heads", "as Gemma 1, norms of heads"],
)  # fmt: skip
def test_parts_that_families_have_are_computed(fields):
    config = tiny_config(n_kv_heads=2, **fields)
    model = tiny_model(config)
    random = np.random.default_rng(1)
    for weight in model.trainable_params():  # biases and norms that are 0 and 1 would show nothing
        if weight.ndim == 1:
            weight.set_data(Tensor(weight.asnumpy() + random.normal(0, 0.3, weight.shape).astype(np.float32)))
    np.testing.assert_allclose(
        decoded(model, config, 3, use_native=True), decoded(model, config, 3, use_native=False), rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"sandwich_norm": True}, {"attn_logit_softcapping": 5.0}, {"final_logit_softcapping": 5.0}, {"mlp_has_bias": True},
        {"normalization": "LayerNorm"}, {"gated_linear_unit": False}, {"position_embedding_type": "alibi"}, {"sliding_window": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_the_kernels_do_not_compute_is_left_to_the_cells(fields):
    config = tiny_config(**fields)
    assert not supports(config, config.seq_length)


def test_sizes_that_are_no_multiple_of_the_lanes():
    config = tiny_config(hidden_size=40, intermediate_size=51, head_dim=10, num_heads=3, n_kv_heads=1)
    model = tiny_model(config)
    np.testing.assert_allclose(
        decoded(model, config, 3, use_native=True), decoded(model, config, 3, use_native=False), rtol=1e-4, atol=2e-4
    )


def test_a_sequence_has_the_same_logits_in_every_batch():
    config = tiny_config(n_kv_heads=2)
    model = tiny_model(config)
    largest = decoded(model, config, 16, use_native=True)
    for batch in (1, 9):  # prefill goes through the back end, whose sums depend on the batch
        alone = decoded(model, config, batch, use_native=True)
        np.testing.assert_allclose(alone, largest[:, :batch], rtol=1e-4, atol=1e-4)


def call(function, arrays):
    """Calls a kernel as MindSpore does; returns its code."""
    shapes = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
    params = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    pointers = (ctypes.POINTER(ctypes.c_int64) * len(arrays))(
        *[ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)) for shape in shapes]
    )
    return function(len(arrays), params, None, pointers, None, None, None)


def head(x, weight, norm):
    """Logits of the kernel ``decode_head``."""
    library = ctypes.CDLL(str(native.library()))
    y = np.zeros((len(x), len(weight)), np.float32)
    arrays = [np.ascontiguousarray(array, np.float32) for array in (x, (1e-6, 1, 0, 0), norm, weight)] + [y]
    assert call(library.decode_head, arrays) == 0
    return y


@pytest.mark.parametrize("size", [16, 37, 64])
def test_sums_do_not_depend_on_neighbours(size):
    random = np.random.default_rng(size)
    x, weight, norm = random.normal(size=(13, size)), random.normal(size=(29, size)), random.normal(size=size)
    together = head(x, weight, norm)
    for row in range(13):
        np.testing.assert_array_equal(head(x[row : row + 1], weight, norm)[0], together[row])
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * norm
    np.testing.assert_allclose(together, scaled @ weight.T, rtol=1e-3, atol=1e-4)


def test_a_position_outside_of_the_cache_is_refused_before_anything_is_written():
    batch, hidden, width, capacity = 1, 4, 2, 3
    library = ctypes.CDLL(str(native.library()))
    shapes = [(batch, hidden), (batch, width), (batch, width), (batch,), (4,), (hidden,)]
    shapes += [(width, hidden)] * 3 + [(hidden, width), (hidden,), (5, hidden), (5, hidden), (hidden, 5)]
    shapes += [(capacity, width), (capacity, width), *[(1,)] * 6, (batch, hidden)]
    for position, code in ((-1, 2), (0, 0), (capacity - 1, 0), (capacity, 2)):
        arrays = [np.zeros(shape, np.float32) for shape in shapes]
        arrays[3] = np.full(batch, position, np.int32)
        arrays[8][:] = arrays[0][:] = arrays[5][:] = 1.0
        assert call(library.decode_layer, arrays) == code
        assert arrays[15].any() == (code == 0), "values are written at good positions only"


def greedy():
    config = tiny_config(n_kv_heads=2)
    generator = Generator(tiny_model(config), config)
    return generator.generate([[1, 2, 3]], options(8))[0].tokens, generator._session._native


@pytest.mark.usefixtures("_builds_anew")
def test_a_compiler_that_fails_is_told_and_does_not_stop_the_run(monkeypatch, tmp_path, caplog):
    expected, kernels = greedy()
    assert kernels is not None
    assert [path.name for path in tmp_path.glob("mindllm/*")] == [native.library().name]
    broken = tmp_path / "broken.cc"
    broken.write_text("this is not C++")
    monkeypatch.setattr(native, "SOURCE", broken)
    native.library.cache_clear()
    with caplog.at_level(logging.INFO):
        tokens, kernels = greedy()
    assert kernels is None
    assert tokens == expected
    assert "decoding without C++ kernels" in caplog.text
    assert "broken.cc:1" in caplog.text
    assert len(list(tmp_path.glob("mindllm/*"))) == 1, "nothing is left of the attempt"


@pytest.mark.usefixtures("_builds_anew")
@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_library_is_built_again(content):
    path = native.library()
    path.unlink()  # it is in use: another file takes its name
    path.write_bytes(content)
    native.library.cache_clear()
    assert native.library() == path
    assert ctypes.CDLL(str(path)).decode_layer


@pytest.mark.usefixtures("_builds_anew")
def test_without_a_compiler_or_a_place_the_cells_decode(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("a file where a directory should be")
    assert "/mindllm-cache-" in str(native.library())  # a directory of this process alone
    native.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a:b"))
    assert native.library() is None
    assert "a path with a colon" in caplog.text
    native.library.cache_clear()
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.INFO):
        assert native.library() is None
    assert "there is no g++" in caplog.text


@pytest.mark.usefixtures("_builds_anew")
def test_the_command_has_no_text_of_a_user(monkeypatch, tmp_path):
    """A directory with shell characters stays a directory."""
    directory = tmp_path / "$(touch hacked); x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    commands = []
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **keys: commands.append((command, keys)) or run(command, **keys)
    )
    tokens, kernels = greedy()
    assert len(tokens) == 8
    assert kernels is not None
    assert native.library().parent == directory / "mindllm"
    ((command, keys),) = commands
    assert isinstance(command, list)
    assert not keys.get("shell")
    assert not Path("hacked").exists()
