"""Predicting on Ascend: which projections are multiplied as integers there, and by which tensors; a CPU knows nothing of it."""

import ml_dtypes
import numpy as np
import pytest
import tiny_quantized
from mindspore import Tensor
from tiny import tiny_config
from weight_quant_matmul import documented_matrix

from mindllm.config import RunConfig, read_model_config
from mindllm.config.tuning import PetConfig
from mindllm.families import with_file_names
from mindllm.finetune.transform import build_tuned_model
from mindllm.generate import load
from mindllm.generate.graphs.quantized_linear import QuantizedLinear, use_quantized_products
from mindllm.models import Kernels
from mindllm.models.weights import initialise, model_weights, quantized_parameters
from mindllm.weight_files import read_hugging_face

WIDER = tiny_quantized.MODEL.model_copy(update={"hidden_size": 64})
PARTS = {"attention": ("wq", "wk", "wv", "wo"), "feed_forward": ("w1", "w3", "w2")}
GROUP = 32
SECTION = {"quant_method": "gptq", "code": "uint4", "group_size": GROUP}


def projections(lm):
    """The cells of all projections by their paths."""
    return {
        f"model.layers.{number}.{part}.{name}": getattr(getattr(layer, part), name)
        for number, layer in enumerate(lm.model.layers)
        for part, names in PARTS.items()
        for name in names
    }


def predicting(directory, device, **model):
    """What ``run_mode: predict`` loads; nothing is asked of a device, and nothing is run."""
    described = read_model_config(directory).model_copy(update={"seq_length": 64, **model})
    keys = {"load_checkpoint": str(directory), "use_parallel": False, "context": {"device_target": device}}
    keys["model"] = {"model_config": described.model_dump(exclude_unset=True)}
    run = RunConfig.model_validate({"run_mode": "predict", **keys})
    with_file_names(run.model.config)
    return load.load_generator(run, None, load.find_weights(run, on_host=False)).model


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr("mindllm.train.device.set_up_device", lambda config: None)
    monkeypatch.setattr(tiny_quantized, "GROUP", GROUP)


@pytest.mark.parametrize("kind", ["gptq", "act-order", "awq", "int8"])
def test_the_tensors_of_the_operator_are_the_matrices_of_the_files(kind, tmp_path, no_device):
    tiny_quantized.save(tmp_path, kind, WIDER)
    cells = projections(predicting(tmp_path, "Ascend", compute_dtype="float16"))
    values = read_hugging_face(tmp_path, WIDER)
    for path, cell in cells.items():
        assert isinstance(cell, QuantizedLinear), path
        tensors = {name: getattr(cell, name).asnumpy() for name in ("codes", "scales", "offsets")}
        assert [getattr(cell, name).name for name in tensors] == [f"{path}.{name}" for name in tensors]
        assert str(cell.codes.dtype) == ("Int8" if kind == "int8" else "Int4")
        assert cell.scales.dtype == cell.offsets.dtype == cell.operand.operand
        bits = 8 if kind == "int8" else 4
        matrix = documented_matrix(*tensors.values(), cell.matmul.antiquant_group_size, bits, np.float16)
        wanted = np.asarray(values[f"{path}.weight"]).T
        if kind == "act-order":
            wanted = wanted[cell.columns.asnumpy()]
        np.testing.assert_array_equal(matrix, wanted.astype(np.float16), err_msg=path)
        assert not cell.matmul.transpose_x
        assert not cell.matmul.transpose_weight


def test_in_bf16_scales_are_rounded_and_nothing_else(tmp_path, no_device):
    tiny_quantized.save(tmp_path, "gptq", WIDER)
    cells = projections(predicting(tmp_path, "Ascend", compute_dtype="bfloat16"))
    values = read_hugging_face(tmp_path, WIDER)
    for path, cell in cells.items():
        tensors = [item.asnumpy().astype(np.float32) for item in (cell.scales, cell.offsets)]
        matrix = documented_matrix(cell.codes.asnumpy(), *tensors, GROUP, 4, ml_dtypes.bfloat16)
        wanted = np.asarray(values[f"{path}.weight"]).T
        np.testing.assert_allclose(matrix.astype(np.float32), wanted, rtol=2**-7, atol=0)  # twice half a bit of eight


@pytest.mark.parametrize(
    ("kind", "group", "dtype"),
    [("nf4", GROUP, "bfloat16"), ("fp8", GROUP, "bfloat16"), ("gptq", 16, "bfloat16"), ("gptq", GROUP, "float32")],
)
def test_what_the_operator_does_not_take_keeps_the_composition(kind, group, dtype, tmp_path, no_device, monkeypatch):
    monkeypatch.setattr(tiny_quantized, "GROUP", group)
    tiny_quantized.save(tmp_path, kind, WIDER)
    cells = projections(predicting(tmp_path, "Ascend", compute_dtype=dtype))
    assert all(cell.is_quantized for cell in cells.values())


def test_a_cpu_makes_the_matrices(tmp_path, no_device):
    tiny_quantized.save(tmp_path, "gptq", WIDER)
    cells = projections(predicting(tmp_path, "CPU", compute_dtype="float16"))
    assert all(cell.is_quantized for cell in cells.values())


def drawn_model(pet=None, **section):
    """A model whose projections are drawn, rounded and held in codes, built for a CPU, and what it was built from."""
    model = tiny_config(
        hidden_size=64, intermediate_size=96, qkv_has_bias=True, compute_dtype="float16", pet_config=pet,
        quantization_config={**SECTION, **section}
    )  # fmt: skip
    model = model if pet else model.frozen
    lm = build_tuned_model(model)
    initialise({**model_weights(lm), **quantized_parameters(lm)}, 0)
    for name, parameter in model_weights(lm).items():
        if name.endswith("bias"):
            parameter.set_data(Tensor(np.random.default_rng(1).normal(0, 1, parameter.shape).astype(np.float32)))
    return lm, model


@pytest.mark.parametrize("ordered", [False, True])
def test_what_stands_around_the_operator_is_what_stands_around_the_matrix_product(ordered):
    """Rounding of the input, the order of columns, the bias and the activation: all but the operator, which no CPU has."""
    lm, model = drawn_model(act_order=ordered)
    before = projections(lm)
    if ordered:
        for cell in before.values():
            order = np.random.default_rng(0).permutation(cell.held.spec.in_features).astype(np.int32)
            cell.held.columns.set_data(Tensor(order))
    use_quantized_products(lm, model, Kernels.choose(model, "Ascend"))
    for path in ("model.layers.0.attention.wq", "model.layers.0.feed_forward.w1"):
        cell, linear = projections(lm)[path], before[path]
        tensors = [item.asnumpy() for item in (cell.codes, cell.scales, cell.offsets)]
        matrix = Tensor(np.ascontiguousarray(documented_matrix(*tensors, GROUP, 4, np.float16).T))
        cell.matmul = lambda x, *_, matrix=matrix, linear=linear: linear.matmul(x, matrix)
        x = Tensor(np.random.default_rng(2).normal(0, 1, (3, linear.held.spec.in_features)).astype(np.float32))
        found, wanted = cell.construct(x).asnumpy(), linear.construct(x).asnumpy()
        assert found.dtype == wanted.dtype == np.float16
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3, err_msg=path)  # sums in another order


def test_names_of_biases_stay():
    lm, model = drawn_model()
    before = set(model_weights(lm))
    use_quantized_products(lm, model, Kernels.choose(model, "Ascend"))
    assert set(model_weights(lm)) == before
    assert any(name.endswith("wq.bias") for name in before)


def test_a_projection_beside_an_adapter_keeps_its_matrix():
    lm, model = drawn_model(PetConfig(lora_rank=2))
    assert quantized_parameters(lm)
    use_quantized_products(lm, model, Kernels.choose(model, "Ascend"))
    assert not any(isinstance(cell, QuantizedLinear) for cell in projections(lm).values())


@pytest.mark.parametrize("scale", [1e-7, 1e6])
def test_a_projection_whose_scales_fp16_cannot_hold_keeps_its_matrix(scale):
    lm, model = drawn_model()
    scales = projections(lm)["model.layers.1.feed_forward.w2"].held.scales
    scales.set_data(Tensor(np.full(scales.shape, scale, np.float32)))
    use_quantized_products(lm, model, Kernels.choose(model, "Ascend"))
    kept = [path for path, cell in projections(lm).items() if not isinstance(cell, QuantizedLinear)]
    assert kept == ["model.layers.1.feed_forward.w2"]
