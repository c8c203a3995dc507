"""Prediction without a graph: the kernels of ``decode.cc`` called from the host, on arrays of weights and of the cache.

Nothing is compiled and MindSpore is not imported, so the first token comes as soon as the weights are read. What the kernels
compute is what graphs with them compute (:mod:`mindllm.generate.graphs.native`); a prompt goes through them in pieces, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from mindllm.architecture.parts import RotarySpec
from mindllm.architecture.quantization import CODES, COLUMNS, SCALES, ZEROS
from mindllm.architecture.rotary_tables import rotary_tables
from mindllm.config import ModelConfig
from mindllm.generate.graphs.library import library, numbers_of, supports, table_of_codes
from mindllm.generate.prompts import CAPACITY_UNIT

PIECE = 32  # tokens of a prompt at once: with more, a processor's cache does not hold them
ATTENTION, FEED_FORWARD = ("wq", "wk", "wv", "wo"), ("w1", "w3", "w2")
READERS = 2  # threads: one waits for a file while another converts

Tokens = Sequence[int] | np.ndarray
Arrays = Mapping[str, np.ndarray]


class HostModel:
    """The weights of a model as arrays, and the kernels that compute with them.

    Arguments:
        config: a model that :meth:`can_compute`.
        weights: all of them by our names, arrays or what becomes one; projections that are held in codes as these.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, ArrayLike]) -> None:
        path = library()
        if path is None:
            raise ValueError("there are no kernels: ask can_compute first")
        self.config = config
        self.weights = read(weights)
        self.kernels = _functions(path)

    @staticmethod
    def can_compute(config: ModelConfig, length: int) -> bool:
        """Whether there are kernels here that compute ``config`` for sequences of ``length`` tokens."""
        ends = config.architecture
        plain = ends.embedding.norm is None and not ends.head.normalised
        return plain and supports(config, rounded_up(length)) and library() is not None


def rounded_up(length: int) -> int:
    """Positions of a cache for sequences of ``length`` tokens."""
    return -(-length // CAPACITY_UNIT) * CAPACITY_UNIT


def read(weights: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """All ``weights`` as arrays in C order: codes and places of columns as they are, all others in fp32."""

    def one(name: str) -> np.ndarray:
        integers = name.endswith((f".{CODES}", f".{COLUMNS}"))
        return np.ascontiguousarray(np.asarray(weights[name]), None if integers else np.float32)

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(weights, pool.map(one, weights), strict=True))


Kernel = Callable[..., int]


def _functions(path: Path) -> dict[str, Kernel]:
    loaded = ctypes.CDLL(str(path))
    return {name: getattr(loaded, name) for name in ("decode_layer", "prefill_layer", "decode_head")}


class Call:
    """The arguments of a kernel: pointers and shapes of ``arrays``, of which some change from call to call."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.count = len(arrays)
        self.kept = list(arrays)
        self.shapes = [(ctypes.c_int64 * max(array.ndim, 1))(*array.shape) for array in arrays]
        self.pointers = (ctypes.c_void_p * self.count)(*[array.ctypes.data for array in arrays])
        self.dimensions = (ctypes.c_int * self.count)(*[array.ndim for array in arrays])
        pointer = ctypes.POINTER(ctypes.c_int64)
        self.all_shapes = (pointer * self.count)(*[ctypes.cast(shape, pointer) for shape in self.shapes])

    def put(self, index: int, array: np.ndarray) -> None:
        """Gives another array of the same number of dimensions in the place of one."""
        self.kept[index] = array
        self.pointers[index] = array.ctypes.data
        self.shapes[index][: array.ndim] = list(array.shape)

    def __call__(self, kernel: Kernel) -> None:
        code = kernel(self.count, self.pointers, self.dimensions, self.all_shapes, None, None, None)
        if code:
            raise RuntimeError(f"a kernel of decode.cc refused its inputs (code {code})")


X, COS, SIN, POSITIONS, KEYS, VALUES = 0, 1, 2, 3, 14, 15  # places among the inputs of a layer


class HostSession:
    """Holds ``batch`` sequences of at most ``capacity`` tokens, as :class:`mindllm.generate.session.Session` does."""

    def __init__(self, model: HostModel, batch: int, length: int) -> None:
        self.batch, self.capacity, self.model = batch, rounded_up(length), model
        config, architecture = model.config, model.config.architecture
        attention = architecture.layers[0].attention
        assert isinstance(attention.position, RotarySpec)  # or the kernels do not compute it
        self._rows, self._width = attention.num_kv_heads * self.capacity, attention.head_dim
        self._embedding = model.weights["model.tok_embeddings.embedding_weight"]
        head = self._embedding if architecture.head.tied else model.weights["lm_head.weight"]
        self._scale = None if architecture.embedding.scale is None else np.float32(architecture.embedding.scale)
        self._tables = rotary_tables(attention.position, attention.head_dim, self.capacity, config.seq_length)
        shape = (len(architecture.main_layers), batch, self._rows, self._width)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        numbers = np.array(numbers_of(config, architecture.layers[0]), np.float32)
        self._layers = [self._call(number, numbers) for number in range(len(architecture.main_layers))]
        norm = model.weights["model.norm_out.weight"]
        empty = np.zeros((1, 1), np.float32)
        self._head = Call([empty, numbers, norm, head, empty])

    def fits(self, batch: int, length: int) -> bool:
        """Returns whether this session can hold ``batch`` sequences of ``length`` tokens."""
        return self.batch == batch and self.capacity >= length

    def compile(self, longest: int) -> None:
        """Nothing is compiled."""

    def forget(self) -> None:
        """Nothing is remembered of earlier prompts."""

    def prefill(self, prompts: Sequence[Tokens]) -> np.ndarray:
        """Fills the cache with the prompts, a piece of one at a time; logits ``[batch, vocab]`` after the last tokens."""
        last = np.empty((self.batch, self.model.config.hidden_size), np.float32)
        first_of: dict[tuple[int, ...], int] = {}
        for row, prompt in enumerate(prompts):
            tokens = tuple(map(int, prompt))
            source = first_of.setdefault(tokens, row)
            if source != row:  # several continuations of one prompt
                self._keys[:, row], self._values[:, row] = self._keys[:, source], self._values[:, source]
                last[row] = last[source]
                continue
            for start in range(0, len(tokens), PIECE):
                piece = np.array(tokens[start : start + PIECE], np.int32)
                positions = np.arange(start, start + len(piece), dtype=np.int32)
                last[row] = self._through_layers("prefill_layer", piece, positions, slice(row, row + 1))[-1]
        return self._logits(last)

    def decode(self, tokens: Tokens, positions: Tokens) -> np.ndarray:
        """Puts one token per sequence at its position; logits ``[batch, vocab]`` after it."""
        ids, places = np.array(tokens, np.int32), np.array(positions, np.int32)
        return self._logits(self._through_layers("decode_layer", ids, places, slice(None)))

    def reorder(self, sources: np.ndarray) -> None:
        """Gives each sequence what the cache holds of sequence ``sources[row]``, int ``[batch]``."""
        if (sources != np.arange(self.batch)).any():
            for cache in (*self._keys, *self._values):
                cache[:] = cache[sources]

    def _call(self, number: int, numbers: np.ndarray) -> Call:
        """The inputs of a layer in the order of the kernel, and its output."""
        weights, path = self.model.weights, f"model.layers.{number}."
        empty, nothing = np.zeros((1, 1), np.float32), np.zeros(1, np.float32)
        matrices = [f"{path}attention.{name}" for name in ATTENTION] + [
            f"{path}feed_forward.{name}" for name in FEED_FORWARD
        ]
        found = [weights.get(f"{name}.weight", weights.get(f"{name}.{CODES}")) for name in matrices]
        norms = [weights[f"{path}{name}.weight"] for name in ("attention_norm", "ffn_norm")]
        biases = [weights.get(f"{path}attention.{name}.bias", nothing) for name in ATTENTION]
        of_heads = [weights.get(f"{path}attention.{name}.weight", nothing) for name in ("query_norm", "key_norm")]
        cache = [self._keys[number].reshape(-1, self._width), self._values[number].reshape(-1, self._width)]
        tokens = [empty, empty, empty, np.zeros(1, np.int32), numbers]
        inputs = [*tokens, norms[0], *found[:4], norms[1], *found[4:], *cache, *biases, *of_heads]
        return Call([*inputs, *self._codes(matrices, nothing), empty])

    def _codes(self, matrices: Sequence[str], nothing: np.ndarray) -> list[np.ndarray]:
        """What codes mean, and scales, zeros and places of columns of each matrix; nothing where none is held in codes."""
        table, weights = table_of_codes(self.model.config), self.model.weights
        if table is None:
            return []
        none = {SCALES: nothing, ZEROS: nothing, COLUMNS: np.zeros(1, np.int32)}
        return [table, *(weights.get(f"{name}.{part}", none[part]) for name in matrices for part in none)]

    def _through_layers(self, kernel: str, tokens: np.ndarray, positions: np.ndarray, rows: slice) -> np.ndarray:
        """What the last layer makes of ``tokens`` ``[n]`` at ``positions``: ``[n, hidden]``; ``rows`` of the cache are theirs."""
        x = self._embedding[tokens]
        if self._scale is not None:
            x *= self._scale
        y = np.empty_like(x)
        cos, sin = (table[positions] for table in self._tables)
        function = self.model.kernels[kernel]
        for number, call in enumerate(self._layers):
            for index, array in ((X, x), (COS, cos), (SIN, sin), (POSITIONS, positions), (call.count - 1, y)):
                call.put(index, array)
            call.put(KEYS, self._keys[number, rows].reshape(-1, self._width))
            call.put(VALUES, self._values[number, rows].reshape(-1, self._width))
            call(function)
            x, y = y, x
        return x

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        logits = np.empty((len(hidden), self.model.config.vocab_size), np.float32)
        self._head.put(0, hidden)
        self._head.put(4, logits)
        self._head(self.model.kernels["decode_head"])
        return logits
