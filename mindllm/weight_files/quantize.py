"""A model rounded to codes of 4 or 8 bits and written as a Hugging Face directory of GPTQ or AWQ: whole or absent.

GPTQ and AWQ look at what the projections of a model meet when it reads a text: for each input the sum of ``x xᵀ``, and the mean
of ``|x|``. The layers run one after the other, so that what is changed in one of them (its weights, once they are rounded) is
seen by those behind it. Operators run one at a time, in MindSpore's PyNative mode: nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindllm.architecture.adapters import WEIGHT
from mindllm.architecture.parts import AttentionSpec, FeedForwardSpec
from mindllm.architecture.quantization import CodeName
from mindllm.config import ModelConfig
from mindllm.data import load_tokenizer
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import UserError
from mindllm.models import build_model
from mindllm.models.linear import Linear
from mindllm.models.weights import assign, trained_weights
from mindllm.outside import read_text
from mindllm.quantize.codes import Codes
from mindllm.quantize.rounding import channel_factors, clipped, gptq, quantize
from mindllm.terminal.progress import Progress, unwatched
from mindllm.train.checkpoint.names import refuse_existing
from mindllm.train.checkpoint.tensors import TensorSource
from mindllm.weight_files.convert import Whole, read_whole
from mindllm.weight_files.family_weights import FamilyWeights
from mindllm.weight_files.hugging_face_export import export_hugging_face
from mindllm.weight_files.quantized.writing import FileFormat, matrices_of, matrix_of, stored

Weights = dict[str, Any]
Method = Literal["rtn", "gptq", "awq"]
QUERY_KEY_VALUE = ("attention.wq", "attention.wk", "attention.wv")
UP = ("feed_forward.w1", "feed_forward.w3")
GROUPS = (128, 64, 32, 16, 8, 4, 2, 1)
INPUTS = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2")
"""Of the projections of a layer that share an input the first one."""
SHARES = {"attention.wk": "attention.wq", "attention.wv": "attention.wq", "feed_forward.w3": "feed_forward.w1"}


@dataclass
class Inputs:
    """Of what one projection, or several that share it, multiplies: ``[in, in]`` and ``[in]``."""

    products: np.ndarray
    magnitudes: np.ndarray
    tokens: int = 0

    @classmethod
    def none(cls, width: int) -> Inputs:
        """Before anything was seen."""
        return cls(np.zeros((width, width)), np.zeros(width))

    def add(self, x: np.ndarray) -> None:
        """Counts ``x`` ``[tokens, in]``."""
        self.products += x.T @ x
        self.magnitudes += np.abs(x).sum(0)
        self.tokens += len(x)

    def divide(self, factors: np.ndarray) -> None:
        """They are smaller by ``factors`` ``[in]`` from now on."""
        self.products /= np.outer(factors, factors)
        self.magnitudes /= factors

    @property
    def mean_magnitudes(self) -> np.ndarray:
        """Means of ``|x|``."""
        return self.magnitudes / max(1, self.tokens)


@dataclass
class LayerByLayer:
    """A model that reads ``rows`` of tokens, int ``[rows, seq]``, a layer at a time."""

    model: ModelConfig
    weights: Mapping[str, TensorSource]
    rows: np.ndarray

    def layers(self, modules: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Inputs]]]:
        """Every layer with what its projections ``modules`` meet; it goes on to the next one with the weights it has then."""
        mode = ms.get_context("mode")
        ms.set_device("CPU")
        ms.set_context(mode=ms.PYNATIVE_MODE)
        try:
            yield from self._layers(modules)
        finally:
            ms.set_context(mode=mode)

    def _layers(self, modules: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Inputs]]]:
        self.lm = build_model(self.model)
        self.lm.set_train(False)
        assign(trained_weights(self.lm), self.weights)
        tokens = (Tensor(row[None].astype(np.int32)) for row in self.rows)
        hidden = [self.lm.model.embedded(row, 1, None) for row in tokens]
        for number in range(self.model.num_layers):
            seen: dict[str, Inputs] = {}
            handles = [_watch(self.lm.model.layers[number], module, seen) for module in modules]
            self._run(number, hidden)
            for handle in handles:
                handle.remove()
            yield number, seen
            hidden = self._run(number, hidden)

    def change(self, changed: Mapping[str, np.ndarray]) -> None:
        """Gives weights other values."""
        own = trained_weights(self.lm)
        assign({name: own[name] for name in changed}, changed)

    def _run(self, number: int, hidden: list[Tensor]) -> list[Tensor]:
        decoder = self.lm.model
        tables, mask = decoder.tables[0](decoder.context_of_layer[number])
        return [decoder.layers[number](x, 1, tables, mask) for x in hidden]


def _watch(layer: nn.Cell, module: str, seen: dict[str, Inputs]):
    cell = layer
    for name in module.split("."):
        cell = getattr(cell, name)
    assert isinstance(cell, Linear)
    seen[module] = Inputs.none(cell.weight.shape[1])

    def count(_: nn.Cell, inputs: tuple[Tensor, ...]) -> None:
        seen[module].add(inputs[0].asnumpy().astype(np.float64))

    return cell.register_forward_pre_hook(count)


@dataclass(frozen=True)
class Options:
    """How a model is rounded: the method, its ``bits`` and ``group``, and the text GPTQ and AWQ look at.

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
    def among(cls, given: Mapping[str, Any]) -> Options:
        """The options of these names, among others, that are given: not None."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: given[name] for name in names if given.get(name) is not None})

    @property
    def code(self) -> CodeName:
        """What codes mean in the files."""
        return "uint4" if self.bits == 4 else "uint8"

    @property
    def form(self) -> FileFormat:
        """The format of the files: the nearest codes are written as GPTQ's, which every reader of these takes."""
        return "awq" if self.method == "awq" else "gptq"


def quantize_weights(
    source: Path, directory: Path, options: Options, dtype: str, max_shard_bytes: int, progress: Progress = unwatched
) -> Path:
    """Writes the model of ``source``, a Hugging Face directory or a checkpoint, in codes as ``directory``.

    ``progress`` is told of layers, or of projections that are rounded to the nearest codes.

    Raises:
        UserError: options that do not fit each other or the model, no calibration text, or the directory is there already.
        RunFailed: it could not be written.
    """
    refuse_existing(directory)
    _refuse(options)
    whole = read_whole(source)
    model = whole.model.model_copy(update={"quantization_config": None})
    options = replace(options, group=_group_of(model, options.group))
    file = options.tokenizer or whole.tokenizer
    tokenizer = None if file is None else load_tokenizer(file)
    if options.method == "rtn":
        weights: Weights = dict(whole.weights)
        codes, names = {}, matrices_of(model)
        for number, name in enumerate(names):
            progress("quantizing projections", number, len(names))
            codes[name] = quantize(matrix_of(model, name, weights), options.code, options.group)
    else:
        weights, codes = _calibrated(model, whole, options, tokenizer, progress)
    written = stored(codes, options.form, options.group)
    return export_hugging_face(
        directory, model, weights, dtype=dtype, max_shard_bytes=max_shard_bytes, tokenizer=tokenizer, codes=written
    )


def _refuse(options: Options) -> None:
    if options.method == "awq" and options.bits != 4:
        raise UserError(f"--bits {options.bits}: files of AWQ have 4 bits; write --bits 4, or another method")
    if options.act_order and options.method != "gptq":
        raise UserError(f"--act-order: an order of columns is GPTQ's; leave it out with --method {options.method}")
    if options.method == "rtn" and options.calibration is not None:
        raise UserError(
            "--calibration: rounding to the nearest codes reads no text; leave it out, or write --method gptq"
        )
    if options.method != "rtn" and options.calibration is None:
        raise UserError(f"--method {options.method} looks at a text; give --calibration FILE")


def _group_of(model: ModelConfig, asked: int) -> int:
    """Columns that share a scale: what is asked for, where it divides all projections, or the largest usual number that does."""
    widths = {name: model.architecture.weight_shapes()[ours[0]][1] for name, ours in matrices_of(model).items()}
    fitting = next(size for size in GROUPS if not any(width % size for width in widths.values()))
    if not asked:
        return fitting
    for name, width in widths.items():
        if width % asked:
            raise UserError(
                f"--group {asked}: {name} has {width} columns, which such groups do not divide; write --group {fitting}"
            )
    return asked


def _calibrated(
    model: ModelConfig, whole: Whole, options: Options, tokenizer: Tokenizer | None, progress: Progress
) -> tuple[Weights, dict[str, Codes]]:
    """Weights, in which AWQ changes norms, and the projections in codes."""
    from mindllm.weight_files.quantize import LayerByLayer

    rows = _rows(model, options, tokenizer)
    weights: Weights = {name: np.array(source, np.float32) for name, source in whole.weights.items()}
    reading = LayerByLayer(model.model_copy(update={"seq_length": rows.shape[1]}), weights, rows)
    names, family = matrices_of(model), FamilyWeights(model)
    codes: dict[str, Codes] = {}
    progress("quantizing layers", 0, model.num_layers)
    for number, seen in reading.layers(INPUTS):
        path = f"model.layers.{number}."
        if options.method == "awq":
            for fold in folds_of(model, number):
                _fold(model, weights, path, fold, seen, options)
        changed = {name: value for name, value in weights.items() if name.startswith(path)}
        for name in (name for name, ours in names.items() if ours[0].startswith(path)):
            module = names[name][0].removeprefix(path).removesuffix(WEIGHT)
            products = seen[SHARES.get(module, module)].products
            codes[name] = _rounded(matrix_of(model, name, weights), products, module, options)
            parts = family.apart(family.weights[f"{name}{WEIGHT}"], codes[name].values())
            changed |= dict(zip(names[name], parts, strict=True))
        reading.change(changed)
        progress("quantizing layers", number + 1, model.num_layers)
    return weights, codes


def _rows(model: ModelConfig, options: Options, tokenizer: Tokenizer | None) -> np.ndarray:
    """Tokens of the text, int ``[samples, length]``: pieces that lie evenly in it."""
    assert options.calibration is not None
    if tokenizer is None:
        raise UserError("no tokenizer was found beside the weights; give --tokenizer FILE")
    try:
        text = read_text(options.calibration)
    except (OSError, ValueError) as error:
        raise UserError(f"--calibration {options.calibration}: is no text that can be read ({error})") from None
    tokens = np.array(tokenizer.encode(text), np.int32)
    length = min(options.length, model.max_position_embedding)
    if len(tokens) < length:
        raise UserError(f"--calibration {options.calibration}: has {len(tokens)} tokens; give at least {length}")
    count = min(options.samples, len(tokens) // length)
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return np.stack([tokens[start : start + length] for start in starts])


@dataclass(frozen=True)
class Fold:
    """Projections that share an input, and what makes it: a norm, or rows of a projection, which are divided by their factors."""

    module: str
    consumers: tuple[str, ...]
    norm: str = ""
    rows_of: str = ""


def folds_of(model: ModelConfig, number: int) -> tuple[Fold, ...]:
    """Where factors on columns can be taken back, in the order in which they are chosen.

    Those of ``wo`` are taken back in rows of ``wv`` where every head has its own values, those of ``w2`` in rows of ``w3``, which
    it is multiplied by.
    """
    layer = model.architecture.layers[number]
    attention, feed_forward = layer.attention, layer.feed_forward
    assert isinstance(attention, AttentionSpec)
    assert isinstance(feed_forward, FeedForwardSpec)
    found = [Fold("attention.wq", QUERY_KEY_VALUE, norm="attention_norm")]
    if attention.num_heads == attention.num_kv_heads:
        found.append(Fold("attention.wo", ("attention.wo",), rows_of="attention.wv"))
    up = UP if feed_forward.gated else UP[:1]
    found.append(Fold("feed_forward.w1", up, norm="ffn_norm"))
    if feed_forward.gated:
        found.append(Fold("feed_forward.w2", ("feed_forward.w2",), rows_of="feed_forward.w3"))
    return tuple(found)


def _fold(
    model: ModelConfig, weights: Weights, path: str, fold: Fold, seen: Mapping[str, Inputs], options: Options
) -> None:
    """Chooses factors for an input and moves them: into the columns of what it meets, out of what makes it."""
    inputs = seen[fold.module]
    matrices = [weights[f"{path}{name}{WEIGHT}"] for name in fold.consumers]
    factors = channel_factors(matrices, inputs.products, inputs.mean_magnitudes, options.code, options.group)
    for name in fold.consumers:
        weights[f"{path}{name}{WEIGHT}"] = weights[f"{path}{name}{WEIGHT}"] * factors
    made_by = f"{path}{fold.norm or fold.rows_of}"
    for name in (f"{made_by}{WEIGHT}", f"{made_by}.bias"):
        if name in weights:
            offset = np.float32(bool(fold.norm) and name.endswith(WEIGHT) and model.layernorm_zero_centered_gamma)
            shaped = factors if weights[name].ndim == 1 else factors[:, None]
            weights[name] = (weights[name] + offset) / shaped - offset
    inputs.divide(factors)


def _rounded(weight: np.ndarray, products: np.ndarray, module: str, options: Options) -> Codes:
    if options.method == "gptq":
        return gptq(weight, products, options.code, options.group, options.act_order)
    if (
        module in QUERY_KEY_VALUE[:2]
    ):  # queries and keys are multiplied with each other: their ranges stay (AWQ's own choice)
        return quantize(weight, options.code, options.group, symmetric=False)
    return clipped(weight, products, options.code, options.group)
