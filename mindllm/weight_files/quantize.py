"""Quantization of a model to 4 or 8 bits, written as a Hugging Face directory of GPTQ or AWQ that is complete or absent.

GPTQ and AWQ calibrate with the inputs of projections while the model reads a text: for each input the sum of ``x xᵀ`` and the
mean of ``|x|``. Layers run one after another, so that later ones see the changes in earlier ones (rounded weights). Operators run
one at a time in MindSpore's PyNative mode, without compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mindllm.architecture.adapters import WEIGHT
from mindllm.architecture.parts import AttentionSpec, FeedForwardSpec
from mindllm.architecture.quantization import CodeName, bits_of
from mindllm.config import ModelConfig
from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError
from mindllm.outside import read_text
from mindllm.quantize import Codes, channel_factors, quantize, quantize_clipped, quantize_gptq
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.weight_files.family_weights import FamilyWeights
from mindllm.weight_files.hugging_face import QuantizedExport, write_weights
from mindllm.weight_files.opening import open_model
from mindllm.weight_files.quantized import Awq, Gptq

if TYPE_CHECKING:
    from mindspore import Tensor, nn

Weights = dict[str, Any]
Method = Literal["rtn", "gptq", "awq"]
FileFormat = Literal["gptq", "awq"]
Matrices = dict[str, tuple[str, ...]]
"""By the name of a projection in files, without ``.weight``, the weights that are its rows."""
QUERY_KEY_VALUE = ("attention.wq", "attention.wk", "attention.wv")
UP = ("feed_forward.w1", "feed_forward.w3")
GROUPS = (128, 64, 32, 16, 8, 4, 2, 1)
INPUTS = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2")
"""The first of the projections that share an input, for each input of a layer."""
SHARED_INPUTS = {"attention.wk": "attention.wq", "attention.wv": "attention.wq", "feed_forward.w3": "feed_forward.w1"}


@dataclass(frozen=True)
class QuantizeOptions:
    """The rounding method, ``bits`` and ``group``, and the calibration text for GPTQ and AWQ.

    ``group``: columns that share a scale; 0: the largest of GROUPS that divides all projections.
    """

    method: Method
    bits: int = 4
    group: int = 0
    act_order: bool = False
    calibration: Path | None = None
    samples: int = 64
    length: int = 512
    tokenizer: Path | None = None

    @classmethod
    def select(cls, values: Mapping[str, Any]) -> QuantizeOptions:
        """Return the options with the values of these names that are not None. Other names are ignored."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: values[name] for name in names if values.get(name) is not None})

    @property
    def code(self) -> CodeName:
        """The kind of codes."""
        return "uint4" if self.bits == 4 else "uint8"

    @property
    def form(self) -> FileFormat:
        """The file format. Nearest codes are written as GPTQ's, which all readers support."""
        return "awq" if self.method == "awq" else "gptq"

    def validate(self) -> None:
        """Raise UserError for options that contradict each other."""
        if self.method == "awq" and self.bits != 4:
            raise UserError(f"--bits {self.bits}: AWQ's files have 4 bits; use --bits 4, or another method")
        if self.act_order and self.method != "gptq":
            raise UserError(f"--act-order: only GPTQ orders columns; leave it out with --method {self.method}")
        if self.method == "rtn" and self.calibration is not None:
            raise UserError("--calibration: rounding to nearest reads no text; leave it out, or use --method gptq")
        if self.method != "rtn" and self.calibration is None:
            raise UserError(f"--method {self.method} requires a calibration text; add --calibration FILE")


def quantize_weights(
    source: Path,
    directory: Path,
    options: QuantizeOptions,
    dtype: str,
    max_shard_bytes: int,
    progress: Progress = unwatched,
) -> Path:
    """Write the model of ``source``, a Hugging Face directory or a checkpoint, in codes as ``directory``.

    ``progress`` counts layers, or projections when rounding to nearest.

    Raises:
        UserError: options contradict each other or the model, the calibration text is unusable, or the directory exists.
        RunFailed: the directory could not be written.
    """
    refuse_existing(directory)
    options.validate()
    model, opened = open_model(source)
    model = model.model_copy(update={"quantization_config": None})
    options = replace(options, group=_group_size(model, options.group))
    file = options.tokenizer or opened.tokenizer
    tokenizer = None if file is None else load_tokenizer(file)
    if options.method == "rtn":
        weights: Weights = dict(opened.weights)
        codes, names = {}, quantizable_matrices(model)
        for number, name in enumerate(names):
            progress("quantizing projections", number, len(names))
            codes[name] = quantize(read_matrix(model, name, weights), options.code, options.group)
    else:
        weights, codes = _calibrate(model, opened.weights, options, tokenizer, progress)
    return write_weights(
        directory,
        model,
        weights,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        tokenizer=tokenizer,
        quantized=pack_matrices(codes, options.form, options.group),
    )


def quantizable_matrices(model: ModelConfig) -> Matrices:
    """Return the projections of layers that are written in codes, in the order of the layers.

    Raises:
        UserError: the model has layers with experts or latent attention, which are unsupported.
    """
    if model.expert_num > 1 or model.kv_lora_rank is not None:
        raise UserError("experts and latent attention cannot be written in codes; pass a dense model")
    family = FamilyWeights(model)
    return {
        name.removesuffix(WEIGHT): weight.ours
        for name, weight in family.weights.items()
        if name.endswith(WEIGHT)
        and len(family.ours[weight.ours[0]]) == 2
        and all(part.startswith("model.layers.") for part in weight.ours)
    }


def read_matrix(model: ModelConfig, name: str, weights: Mapping[str, TensorSource]) -> np.ndarray:
    """Return a projection of :func:`quantizable_matrices` as float32 ``[out, in]``."""
    family = FamilyWeights(model)
    weight = family.weights[f"{name}{WEIGHT}"]
    values = np.asarray(family.write_tensor(weight, weights), np.float32)
    return values.T if weight.transposed else values


def pack_matrices(codes: Mapping[str, Codes], form: FileFormat, group: int) -> QuantizedExport:
    """Return the tensors and the section of ``config.json`` for matrices in codes.

    Raises:
        UserError: a matrix does not fill the words of the format.
    """
    tensors = {}
    for name, matrix in codes.items():
        out, width = matrix.shape
        per_word = 32 // bits_of(matrix.code)
        if out % per_word or (form == "gptq" and width % per_word):
            raise UserError(f"{name}: {out} x {width} values do not fill the words of {per_word} codes in {form} files")
        parts = Gptq.tensors(matrix) if form == "gptq" else Awq.tensors(matrix)
        tensors[f"{name}{WEIGHT}"] = {f"{name}.{part}": array for part, array in parts.items()}
    first = next(iter(codes.values()))
    config: dict[str, Any] = {"quant_method": form, "bits": bits_of(first.code), "group_size": group or -1}
    if form == "awq":
        config |= {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    else:
        config |= {"desc_act": first.columns is not None, "sym": True, "checkpoint_format": "gptq"}
        config |= {"lm_head": False, "damp_percent": 0.01}
    return QuantizedExport(config, tensors)


def _group_size(model: ModelConfig, requested: int) -> int:
    """Return the requested group size if it divides all projections. 0 requests the largest usual size that does."""
    widths = {
        name: model.architecture.weight_shapes()[parts[0]][1] for name, parts in quantizable_matrices(model).items()
    }
    fitting = next(size for size in GROUPS if not any(width % size for width in widths.values()))
    if not requested:
        return fitting
    for name, width in widths.items():
        if width % requested:
            raise UserError(
                f"--group {requested}: {name} has {width} columns, which is not a multiple; use --group {fitting}"
            )
    return requested


@dataclass
class InputStatistics:
    """Statistics of the input of a projection, or of several that share it: sums of ``x xᵀ`` and of ``|x|``."""

    products: np.ndarray
    magnitudes: np.ndarray
    tokens: int = 0

    @classmethod
    def empty(cls, width: int) -> InputStatistics:
        """Return statistics of no inputs."""
        return cls(np.zeros((width, width)), np.zeros(width))

    def add(self, x: np.ndarray) -> None:
        """Add ``x`` ``[tokens, in]``."""
        self.products += x.T @ x
        self.magnitudes += np.abs(x).sum(0)
        self.tokens += len(x)

    def divide(self, factors: np.ndarray) -> None:
        """Divide the inputs by ``factors`` ``[in]``."""
        self.products /= np.outer(factors, factors)
        self.magnitudes /= factors

    @property
    def mean_magnitudes(self) -> np.ndarray:
        """Means of ``|x|``."""
        return self.magnitudes / max(1, self.tokens)


@dataclass
class LayerwiseModel:
    """A model that reads ``rows`` of tokens, int ``[rows, seq]``, a layer at a time."""

    model: ModelConfig
    weights: Mapping[str, TensorSource]
    rows: np.ndarray

    def layers(self, modules: tuple[str, ...]) -> Iterator[tuple[int, dict[str, InputStatistics]]]:
        """Yield every layer with the inputs of its projections ``modules``, and continue with the layer's weights after that."""
        import mindspore as ms

        mode = ms.get_context("mode")
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        try:
            yield from self._layers(modules)
        finally:
            ms.set_context(mode=mode)

    def _layers(self, modules: tuple[str, ...]) -> Iterator[tuple[int, dict[str, InputStatistics]]]:
        from mindspore import Tensor

        from mindllm.models import build_model
        from mindllm.models.weights import assign, trained_weights

        self.lm = build_model(self.model)
        self.lm.set_train(False)
        assign(trained_weights(self.lm), self.weights)
        tokens = (Tensor(row[None].astype(np.int32)) for row in self.rows)
        hidden = [self.lm.model.embedded(row, 1, None) for row in tokens]
        for number in range(self.model.num_layers):
            statistics: dict[str, InputStatistics] = {}
            handles = [_observe(self.lm.model.layers[number], module, statistics) for module in modules]
            self._run(number, hidden)
            for handle in handles:
                handle.remove()
            yield number, statistics
            hidden = self._run(number, hidden)

    def update(self, changed: Mapping[str, np.ndarray]) -> None:
        """Assign new values to some weights."""
        from mindllm.models.weights import assign, trained_weights

        parameters = trained_weights(self.lm)
        assign({name: parameters[name] for name in changed}, changed)

    def _run(self, number: int, hidden: list[Tensor]) -> list[Tensor]:
        decoder = self.lm.model
        tables, mask = decoder.tables[0](decoder.context_of_layer[number])
        return [decoder.layers[number](x, 1, tables, mask) for x in hidden]


def _observe(layer: nn.Cell, module: str, statistics: dict[str, InputStatistics]):
    """Add the inputs of a projection to ``statistics``, until the returned handle is removed."""
    from mindllm.models.linear import Linear

    cell = layer
    for name in module.split("."):
        cell = getattr(cell, name)
    assert isinstance(cell, Linear)
    statistics[module] = InputStatistics.empty(cell.weight.shape[1])

    def add(_: nn.Cell, inputs: tuple[Tensor, ...]) -> None:
        statistics[module].add(inputs[0].asnumpy().astype(np.float64))

    return cell.register_forward_pre_hook(add)


def _calibrate(
    model: ModelConfig,
    sources: Mapping[str, TensorSource],
    options: QuantizeOptions,
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> tuple[Weights, dict[str, Codes]]:
    """Return the weights, in which AWQ changes norms, and the projections in codes."""
    rows = _calibration_rows(model, options, tokenizer)
    weights: Weights = {name: np.array(source, np.float32) for name, source in sources.items()}
    layerwise = LayerwiseModel(model.model_copy(update={"seq_length": rows.shape[1]}), weights, rows)
    names, family = quantizable_matrices(model), FamilyWeights(model)
    codes: dict[str, Codes] = {}
    progress("quantizing layers", 0, model.num_layers)
    for number, statistics in layerwise.layers(INPUTS):
        path = f"model.layers.{number}."
        if options.method == "awq":
            for fold in awq_folds(model, number):
                _apply_fold(model, weights, path, fold, statistics[fold.module], options)
        changed = {name: value for name, value in weights.items() if name.startswith(path)}
        for name in (name for name, parts in names.items() if parts[0].startswith(path)):
            module = names[name][0].removeprefix(path).removesuffix(WEIGHT)
            products = statistics[SHARED_INPUTS.get(module, module)].products
            matrix = read_matrix(model, name, weights)
            if options.method == "gptq":
                codes[name] = quantize_gptq(matrix, products, options.code, options.group, options.act_order)
            elif module in QUERY_KEY_VALUE[:2]:
                # Queries and keys are multiplied with each other, so AWQ does not clip their ranges.
                codes[name] = quantize(matrix, options.code, options.group, symmetric=False)
            else:
                codes[name] = quantize_clipped(matrix, products, options.code, options.group)
            rounded = family.split(family.weights[f"{name}{WEIGHT}"], codes[name].values())
            changed |= dict(zip(names[name], rounded, strict=True))
        layerwise.update(changed)
        progress("quantizing layers", number + 1, model.num_layers)
    return weights, codes


def _calibration_rows(model: ModelConfig, options: QuantizeOptions, tokenizer: Tokenizer | None) -> np.ndarray:
    """Return evenly spaced pieces of the calibration text, int ``[samples, length]``."""
    assert options.calibration is not None
    if tokenizer is None:
        raise UserError("no tokenizer is next to the weights; add --tokenizer FILE")
    try:
        text = read_text(options.calibration)
    except (OSError, ValueError) as error:
        raise UserError(f"--calibration {options.calibration}: is not a readable text ({error})") from None
    tokens = np.array(tokenizer.encode(text), np.int32)
    length = min(options.length, model.max_position_embedding)
    if len(tokens) < length:
        raise UserError(
            f"--calibration {options.calibration}: has {len(tokens)} tokens; at least {length} are required"
        )
    count = min(options.samples, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return np.stack([tokens[start : start + length] for start in starts])


@dataclass(frozen=True)
class AwqFold:
    """Projections that share an input, and the norm or the projection that produces it and is divided by their factors."""

    module: str
    consumers: tuple[str, ...]
    norm: str = ""
    projection: str = ""


def awq_folds(model: ModelConfig, number: int) -> tuple[AwqFold, ...]:
    """Return where factors on columns can be compensated, in the order in which they are chosen.

    Those of ``wo`` are compensated in rows of ``wv`` if every head has its own values, those of ``w2`` in rows of ``w3``, whose
    output is multiplied.
    """
    layer = model.architecture.layers[number]
    attention, feed_forward = layer.attention, layer.feed_forward
    assert isinstance(attention, AttentionSpec)
    assert isinstance(feed_forward, FeedForwardSpec)
    folds = [AwqFold("attention.wq", QUERY_KEY_VALUE, norm="attention_norm")]
    if attention.num_heads == attention.num_kv_heads:
        folds.append(AwqFold("attention.wo", ("attention.wo",), projection="attention.wv"))
    folds.append(AwqFold("feed_forward.w1", UP if feed_forward.gated else UP[:1], norm="ffn_norm"))
    if feed_forward.gated:
        folds.append(AwqFold("feed_forward.w2", ("feed_forward.w2",), projection="feed_forward.w3"))
    return tuple(folds)


def _apply_fold(
    model: ModelConfig, weights: Weights, path: str, fold: AwqFold, inputs: InputStatistics, options: QuantizeOptions
) -> None:
    """Choose factors for an input, multiply the columns of its consumers by them, and divide its producer."""
    matrices = [weights[f"{path}{name}{WEIGHT}"] for name in fold.consumers]
    factors = channel_factors(matrices, inputs.products, inputs.mean_magnitudes, options.code, options.group)
    for name in fold.consumers:
        weights[f"{path}{name}{WEIGHT}"] = weights[f"{path}{name}{WEIGHT}"] * factors
    producer = f"{path}{fold.norm or fold.projection}"
    for name in (f"{producer}{WEIGHT}", f"{producer}.bias"):
        if name in weights:
            offset = np.float32(bool(fold.norm) and name.endswith(WEIGHT) and model.layernorm_zero_centered_gamma)
            divisors = factors if weights[name].ndim == 1 else factors[:, None]
            weights[name] = (weights[name] + offset) / divisors - offset
    inputs.divide(factors)
