"""Quantized projections in Hugging Face directories: GPTQ, AWQ, FP8, HQQ and bitsandbytes, each read as ``Codes``.

:func:`substitute_matrices` replaces the tensors of a quantized projection by one matrix. :func:`packed_weights` gives a model
that computes with codes the tensors of these codes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mindllm.architecture.adapters import WEIGHT
from mindllm.architecture.quantization import CODES, COLUMNS, CodeSpec, bits_of
from mindllm.config import ModelConfig
from mindllm.config.quantization import QuantizationConfig
from mindllm.errors import UserError
from mindllm.outside import parse_json
from mindllm.quantize import Codes, code_values, round_tensors
from mindllm.train.checkpoint.tensors import Converted, LazyTensor, TensorSource

FLOAT32 = np.dtype(np.float32)
FLOATS = ("float16", "bfloat16", "float32")
WORD = 32  # bits
LONGEST_STATE = 1 << 16  # bytes of JSON


@dataclass(frozen=True)
class QuantizedModule:
    """The tensors of one quantized projection in a directory, by what follows its name. Errors name the tensor."""

    directory: Path
    name: str
    parts: Mapping[str, TensorSource]

    def error(self, part: str, message: str) -> UserError:
        """Return an error about one tensor."""
        source: Any = self.parts.get(part)
        path = getattr(source, "path", self.directory)
        return UserError(f"{path}: {self.name}.{part}: {message}")

    def shape(self, part: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of a required tensor with this number of dimensions."""
        if part not in self.parts:
            raise self.error(part, f"missing; the other tensors of {self.name} require it")
        shape = tuple(self.parts[part].shape)
        if len(shape) != dimensions or 0 in shape:
            raise self.error(part, f"has shape {list(shape)} instead of {dimensions} dimensions")
        return shape

    def array(self, part: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
        """Read a required tensor of this shape and one of these types."""
        stored_shape = self.shape(part, len(shape))
        if stored_shape != shape:
            raise self.error(part, f"has shape {list(stored_shape)} instead of {list(shape)}")
        dtype = np.dtype(self.parts[part].dtype).name
        if dtype not in dtypes:
            raise self.error(part, f"is of {dtype} instead of {' or '.join(dtypes)}")
        return np.asarray(self.parts[part])

    def floats(self, part: str, shape: tuple[int, ...]) -> np.ndarray:
        """Read finite numbers as float32."""
        values = self.array(part, shape, *FLOATS).astype(np.float32)
        if not np.isfinite(values).all():
            raise self.error(part, "has values that are not finite")
        return values


@dataclass(frozen=True)
class QuantizedFormat(ABC):
    """The reader of one method's files for one projection.

    Attributes:
        MARK: the tensor that identifies a quantized projection.
        PARTS: all of its possible tensors except the bias.
    """

    MARK: ClassVar[str]
    PARTS: ClassVar[tuple[str, ...]]
    module: QuantizedModule
    section: QuantizationConfig

    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Return ``[out, in]`` of the matrix."""

    @abstractmethod
    def read(self) -> Codes:
        """Read the matrix."""

    def group_count(self, part: str, width: int) -> tuple[int, int]:
        """Return the columns of a group and the number of groups, which must divide the columns."""
        size = self.section.group_size or width
        if width % size:
            raise self.module.error(part, f"has {width} columns, which is not a multiple of the group size {size}")
        return size, width // size


class Gptq(QuantizedFormat):
    """GPTQ's files (Frantar et al., 2023; AutoGPTQ, GPTQModel): integers packed in int32, of the transposed matrix.

    ``qweight`` int32 ``[in · bits / 32, out]`` has the codes of ``32 / bits`` adjacent columns in a word, lowest bits first.
    ``qzeros`` int32 ``[groups, out · bits / 32]`` has the zero points of adjacent rows in the same way, less one in the first
    version of the format. ``scales`` is ``[groups, out]``. ``g_idx`` int32 ``[in]`` is the group of each column (absent: in
    order).
    """

    MARK = "qweight"
    PARTS = ("qweight", "qzeros", "scales", "g_idx")

    def shape(self) -> tuple[int, int]:
        rows, out = self.module.shape("qweight", 2)
        return out, rows * WORD // bits_of(self.section.code)

    def read(self) -> Codes:
        module, code = self.module, self.section.code
        out, width = self.shape()
        bits = bits_of(code)
        size = self.section.group_size or width
        groups = -(-width // size)
        packed = module.array("qweight", (width * bits // WORD, out), "int32")
        if out * bits % WORD:
            raise module.error("qweight", f"has {out} rows, whose zero points do not fill words of {WORD} bits")
        zeros = unpack_words(module.array("qzeros", (groups, out * bits // WORD), "int32"), bits).astype(np.float32)
        if self.section.quant_method == "gptq":
            zeros += 1.0
        scales = module.floats("scales", (groups, out))
        codes = unpack_words(packed.T, bits)  # [out, in]
        column_groups, columns = self._groups(width, size, groups)
        first = column_groups[:: self.section.group_of(width)]
        if columns is not None:
            codes = codes[:, columns]
        return Codes.from_unpacked(code, codes, scales[first].T, zeros[first].T, columns)

    def _groups(self, width: int, size: int, groups: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the group of every column in an order of columns with ascending groups, and this order if it differs."""
        ordered, ascending = self.section.act_order, np.arange(width) // size
        if "g_idx" not in self.module.parts:
            return ascending, np.arange(width, dtype=np.int32) if ordered else None
        stored = self.module.array("g_idx", (width,), "int32", "int64")
        if stored.min() < 0 or stored.max() >= groups:
            raise self.module.error("g_idx", f"has groups {stored.min()} to {stored.max()} of {groups}")
        if not ordered:
            if not np.array_equal(stored, ascending):
                raise self.module.error("g_idx", "groups are not in order, but config.json has no desc_act")
            return ascending, None
        columns = np.argsort(stored, kind="stable").astype(np.int32)
        if not np.array_equal(stored[columns], ascending):
            raise self.module.error("g_idx", f"has groups of other sizes than {size}")
        return ascending, columns

    @staticmethod
    def tensors(codes: Codes) -> dict[str, np.ndarray]:
        """Return the tensors of a matrix in the first version of the format, where zero points are 1 or more."""
        assert codes.zeros is not None
        bits, width = bits_of(codes.code), codes.shape[1]
        flat = codes.unpacked().reshape(codes.shape)
        column_groups = (np.arange(width) // codes.group).astype(np.int32)
        if codes.columns is not None:
            inverse = np.argsort(codes.columns)
            flat, column_groups = flat[:, inverse], column_groups[inverse]
        zeros = (codes.zeros.T.astype(np.int64) - 1).astype(np.uint8)
        return {
            "qweight": np.ascontiguousarray(pack_words(flat, bits).T),
            "qzeros": pack_words(zeros, bits),
            "scales": np.ascontiguousarray(codes.scales.T, np.float16),
            "g_idx": column_groups,
        }


class Awq(QuantizedFormat):
    """AWQ's files (Lin et al., 2024; AutoAWQ's "gemm" packing): the 4-bit codes of eight adjacent rows in an int32.

    ``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``. Within a word, rows
    have the order that its kernels unpack fastest.
    """

    MARK = "qweight"
    PARTS = ("qweight", "qzeros", "scales")
    BITS, ROWS = 4, 8
    PLACES = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the row of each four bits of a word, from the lowest

    def shape(self) -> tuple[int, int]:
        width, words = self.module.shape("qweight", 2)
        return words * self.ROWS, width

    def read(self) -> Codes:
        out, width = self.shape()
        _, groups = self.group_count("qweight", width)
        codes = self._unpack(self.module.array("qweight", (width, out // self.ROWS), "int32")).T
        zeros = self._unpack(self.module.array("qzeros", (groups, out // self.ROWS), "int32")).T
        scales = self.module.floats("scales", (groups, out)).T
        return Codes.from_unpacked(self.section.code, codes, scales, zeros)

    def _unpack(self, packed: np.ndarray) -> np.ndarray:
        """Unpack int32 ``[n, out / 8]`` to uint8 ``[n, out]``."""
        words = unpack_words(packed, self.BITS).reshape(len(packed), -1, self.ROWS)
        return words[:, :, np.argsort(self.PLACES)].reshape(len(packed), -1)

    @classmethod
    def tensors(cls, codes: Codes) -> dict[str, np.ndarray]:
        """Return the tensors of a matrix."""
        assert codes.zeros is not None

        def pack(rows: np.ndarray) -> np.ndarray:
            placed = rows.reshape(len(rows), -1, cls.ROWS)[:, :, cls.PLACES]
            return pack_words(placed.reshape(len(rows), -1), cls.BITS)

        return {
            "qweight": pack(codes.unpacked().reshape(codes.shape).T),
            "qzeros": pack(codes.zeros.T.astype(np.uint8)),
            "scales": np.ascontiguousarray(codes.scales.T, np.float16),
        }


def unpack_words(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32 ``[rows, words]`` to uint8 ``[rows, words · 32 / bits]``, lowest bits first."""
    words = np.ascontiguousarray(packed).view(np.uint32)  # unsigned, so that shifts bring in zeros
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    codes = (words[:, :, None] >> shifts) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 ``[rows, columns]`` to int32 ``[rows, columns · bits / 32]``, the inverse of :func:`unpack_words`."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    grouped = codes.reshape(len(codes), -1, WORD // bits).astype(np.uint32) << shifts
    return np.bitwise_or.reduce(grouped, axis=2).view(np.int32)


class Fp8(QuantizedFormat):
    """Blocks of FP8 (DeepSeek-V3, section 3.3): ``weight`` E4M3 ``[out, in]``, ``weight_scale_inv`` a factor for every block."""

    MARK = "weight_scale_inv"
    PARTS = ("weight", "weight_scale_inv")

    def shape(self) -> tuple[int, int]:
        out, width = self.module.shape("weight", 2)
        return out, width

    def read(self) -> Codes:
        out, width = self.shape()
        block, group = self.section.group_size, self.section.group_of(width)
        codes = self.module.array("weight", (out, width), "float8_e4m3fn").view(np.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            raise self.module.error("weight", "has values that are not finite")
        factors = self.module.floats("weight_scale_inv", (-(-out // block), -(-width // block)))
        # Each row has the factors of the blocks that it crosses.
        scales = factors[np.arange(out) // block][:, np.arange(0, width, group) // block]
        return Codes.from_unpacked(self.section.code, codes, scales)


class Hqq(QuantizedFormat):
    """HQQ's files (Badri & Shaji, 2023), groups along rows: ``(W_q - zero) · scale``.

    Groups are in row order, ``[groups of the matrix, group]``. With 4 bits, ``W_q`` has the first half of them in the high and
    the second half in the low bits of its bytes. ``scale`` and ``zero`` are ``[groups, 1]``. ``shape`` is that of the matrix.
    """

    MARK = "W_q"
    PARTS = (
        *("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype"),
        *("view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
        *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
    )

    def shape(self) -> tuple[int, int]:
        out, width = map(int, self.module.array("shape", (2,), "int64", "int32"))
        if out <= 0 or width <= 0:
            raise self.module.error("shape", f"is not the shape of a matrix: {[out, width]}")
        return out, width

    def read(self) -> Codes:
        out, width = self.shape()
        size, per_row = self.group_count("shape", width)
        groups = out * per_row
        halves = 2 if bits_of(self.section.code) == 4 else 1
        if groups % halves:
            raise self.module.error("W_q", f"has an odd number of groups, {groups}")
        packed = self.module.array("W_q", (groups // halves, size), "uint8")
        codes = np.concatenate([packed >> 4, packed & 15]) if halves == 2 else packed
        scales, zeros = (self.module.floats(part, (groups, 1)).reshape(out, -1) for part in ("scale", "zero"))
        return Codes.from_unpacked(self.section.code, codes.reshape(out, width), scales, zeros)


class BitsAndBytes4(QuantizedFormat):
    """NF4 and FP4 of bitsandbytes: codes in blocks (QLoRA: Dettmers et al., 2023).

    ``weight`` has the codes in row order, two per byte, the first in the high bits. ``weight.absmax`` is the scale of each block
    of 64, or its code with double quantization: an index into ``weight.nested_quant_map``, scaled by ``weight.nested_absmax`` for
    each 256 and shifted by an offset. Shape and sizes are JSON, as bytes, in ``weight.quant_state.bitsandbytes__nf4``.
    """

    STATE = "weight.quant_state.bitsandbytes__"
    MARK = "weight.absmax"
    PARTS = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *(f"{STATE}nf4", f"{STATE}fp4"),
    )

    def shape(self) -> tuple[int, int]:
        shape = self.state().get("shape")
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)):
            raise self._state_error(f"has an invalid shape (value {shape})")
        return shape[0], shape[1]

    def state(self) -> dict[str, Any]:
        """Return the content stored as JSON."""
        part = f"{self.STATE}{self.section.code}"
        (size,) = self.module.shape(part, 1)
        if size > LONGEST_STATE:
            raise self._state_error(f"has {size} bytes, at most {LONGEST_STATE} are supported")
        try:
            content = parse_json(self.module.array(part, (size,), "uint8").tobytes())
        except ValueError as error:
            raise self._state_error(f"is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("quant_type") != self.section.code:
            raise self._state_error(f"does not describe codes of {self.section.code}")
        return content

    def read(self) -> Codes:
        module, code = self.module, self.section.code
        out, width = self.shape()
        state, size = self.state(), out * width
        block = self._block_size(state, "blocksize")
        group = self.section.group_of(width)
        if block % group:
            raise self._state_error(f"has blocks of {block}, config.json of {self.section.group_size}")
        if "weight" not in module.parts:
            raise module.error("weight", "missing")
        packed = np.ascontiguousarray(np.asarray(module.parts["weight"])).reshape(-1).view(np.uint8)
        if packed.size != (size + 1) // 2:
            raise module.error("weight", f"has {packed.size} bytes instead of {(size + 1) // 2}")
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[:size].reshape(out, width)
        scales = self._scales(state, -(-size // block))
        if "weight.quant_map" in module.parts:
            table = code_values(code)
            stored = module.array("weight.quant_map", table.shape, *FLOATS).astype(np.float32)
            if not np.allclose(stored, table, atol=2e-3):
                raise module.error("weight.quant_map", f"differs from the table of {code}")
        # Blocks that end within a row become smaller groups.
        group_scales = scales[np.arange(0, size, group) // block].reshape(out, width // group)
        return Codes.from_unpacked(code, codes, group_scales)

    def _scales(self, state: dict[str, Any], blocks: int) -> np.ndarray:
        if "weight.nested_absmax" not in self.module.parts:
            return self.module.floats("weight.absmax", (blocks,))
        codes = self.module.array("weight.absmax", (blocks,), "uint8")
        size = self._block_size(state, "nested_blocksize")
        outer = self.module.floats("weight.nested_absmax", (-(-blocks // size),))
        offset = state.get("nested_offset")
        if not isinstance(offset, int | float) or not math.isfinite(offset):
            raise self._state_error(f"has an invalid nested_offset (value {offset})")
        table = self.module.floats("weight.nested_quant_map", (256,))
        return table[codes] * outer[np.arange(blocks) // size] + np.float32(offset)

    def _block_size(self, state: dict[str, Any], key: str) -> int:
        size = state.get(key)
        if type(size) is not int or size <= 0:
            raise self._state_error(f"has an invalid {key} (value {size})")
        return size

    def _state_error(self, message: str) -> UserError:
        return self.module.error(f"{self.STATE}{self.section.code}", message)


class BitsAndBytes8(QuantizedFormat):
    """8-bit integers of bitsandbytes (Dettmers et al., 2022): ``weight`` int8, ``SCB`` the largest magnitude of every row."""

    MARK = "SCB"
    PARTS = ("weight", "SCB", "weight_format")

    def shape(self) -> tuple[int, int]:
        out, width = self.module.shape("weight", 2)
        return out, width

    def read(self) -> Codes:
        out, width = self.shape()
        if "weight_format" in self.module.parts and np.asarray(self.module.parts["weight_format"]).any():
            raise self.module.error("weight_format", "is not row-wise; save the model again")
        codes = self.module.array("weight", (out, width), "int8").view(np.uint8)
        scales = self.module.floats("SCB", (out,)) / np.float32(127)
        return Codes.from_unpacked(self.section.code, codes, scales[:, None])


def find_format(section: QuantizationConfig) -> type[QuantizedFormat]:
    """Return the reader for the files that ``section`` describes."""
    if section.quant_method == "bitsandbytes":
        return BitsAndBytes8 if section.code == "int8" else BitsAndBytes4
    formats: dict[str, type[QuantizedFormat]] = {"awq": Awq, "fp8": Fp8, "hqq": Hqq}
    return formats.get(section.quant_method, Gptq)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized projection, dequantized to float32 each time it becomes an array.

    Attributes:
        matrix_shape: ``[out, in]`` of the stored matrix.
        row_indices: rows of the stored matrix, None for all.
        transposed: True if the family's files have the matrix as ``[in, out]`` where it is not quantized.
    """

    module: QuantizedModule
    section: QuantizationConfig
    matrix_shape: tuple[int, int]
    row_indices: np.ndarray | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.matrix_shape[0] if self.row_indices is None else len(self.row_indices)
        return (self.matrix_shape[1], rows) if self.transposed else (rows, self.matrix_shape[1])

    @property
    def dtype(self) -> np.dtype:
        return FLOAT32

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        values = self.codes().values()
        return (values.T if self.transposed else values).astype(dtype or FLOAT32, copy=False)

    def codes(self) -> Codes:
        """Read the matrix ``[out, in]`` in codes."""
        codes = find_format(self.section)(self.module, self.section).read()
        return codes if self.row_indices is None else codes.rows(self.row_indices)

    def rows(self, indices: np.ndarray) -> QuantizedMatrix:
        """Return some rows of the matrix ``[out, in]``."""
        return replace(self, row_indices=indices, transposed=False)


def substitute_matrices(
    directory: Path,
    tensors: Mapping[str, TensorSource],
    section: QuantizationConfig,
    transposed: Collection[str] = (),
) -> dict[str, TensorSource]:
    """Return the tensors of ``directory`` with a matrix ``NAME.weight`` in place of each quantized projection ``NAME``.

    Arguments:
        transposed: names of matrices that the family has as ``[in, out]``.

    Raises:
        UserError: no projection is quantized, or a tensor has a wrong shape.
    """
    form = find_format(section)
    ending = f".{form.MARK}"
    modules = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    if not modules:
        raise UserError(
            f"{directory}: no tensor ends in {ending}, but config.json has quant_method {section.quant_method}"
        )
    result = dict(tensors)
    for name in modules:
        parts = {part: result.pop(f"{name}.{part}") for part in form.PARTS if f"{name}.{part}" in result}
        module = QuantizedModule(directory, name, parts)
        weight = f"{name}{WEIGHT}"
        if weight in result:
            raise UserError(f"{directory}: both {weight} and {name}{ending}, the quantized matrix, exist")
        matrix = QuantizedMatrix(module, section, form(module, section).shape())
        result[weight] = replace(matrix, transposed=weight in transposed)
    return result


def packed_weights(model: ModelConfig, weights: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return ``weights`` with tensors of codes for the projections that ``model`` stores in codes."""
    result = dict(weights)
    for number, layer in enumerate(model.architecture.layers):
        for spec in layer.codes:
            path = f"model.layers.{number}.{spec.module}"
            if f"{path}{WEIGHT}" not in result:
                continue
            matrix = _PackedMatrix(spec, result.pop(f"{path}{WEIGHT}"))
            for name, shape in spec.shapes().items():
                dtype = np.dtype({CODES: np.uint8, COLUMNS: np.int32}.get(name, np.float32))
                result[f"{path}.{name}"] = LazyTensor(shape, dtype, matrix.reader(name))
    return result


class _PackedMatrix:
    """The tensors of one matrix in codes. The matrix is read once; each tensor is dropped when it has been taken."""

    def __init__(self, spec: CodeSpec, source: TensorSource) -> None:
        self.spec, self.source = spec, source
        self._pending: dict[str, np.ndarray] = {}

    def reader(self, name: str) -> Callable[[], np.ndarray]:
        """Return a function that takes one of the tensors."""

        def take() -> np.ndarray:
            if name not in self._pending:
                self._pending = self._read()
            return self._pending.pop(name)

        return take

    def _read(self) -> dict[str, np.ndarray]:
        stored = self.source.source if isinstance(self.source, Converted) else self.source
        if not isinstance(stored, QuantizedMatrix):
            return round_tensors(np.asarray(stored, np.float32), self.spec)
        tensors = stored.codes().tensors()
        expected, shapes = self.spec.shapes(), {name: array.shape for name, array in tensors.items()}
        if stored.section.code != self.spec.code or shapes != expected:
            raise UserError(
                f"{stored.module.directory}: {stored.module.name} has codes {stored.section.code} of shapes {shapes} instead of "
                f"model.model_config.quantization_config's {self.spec.code} {expected}; remove the key"
            )
        return tensors
