"""Decoding on a CPU with two operators in C++ (``decode.cc``): one per layer, one for the head.

A step of a few tokens is bound by reading the weights and by the number of operators; the compiled graph has some sixty per
layer. The kernels are the mathematics of :mod:`mindllm.models` in fp32; everything else goes through the cells themselves.

``decode.cc`` is built for the processor it runs on, once, into the user's cache; what fails is told and not fatal. The command
is a list of constants and paths: no shell, and nothing that a configuration or a checkpoint says.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import ops as P

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import AttentionSpec, FeedForwardSpec, RotarySpec
from mindllm.cache import user_cache
from mindllm.config import ModelConfig
from mindllm.files import atomic_path
from mindllm.generate.graphs.cache import CachedDecoder
from mindllm.models import Kernels
from mindllm.models.attention.attention import Attention
from mindllm.models.feed_forward import FeedForward
from mindllm.models.linear import Linear
from mindllm.quantize.tables import table_of

SOURCE = Path(__file__).with_name("decode.cc")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
BUILD_SECONDS = 120
logger = logging.getLogger(__name__)
LARGEST_BATCH = 16  # above it the matrix products of the back end are faster
WIDEST_HEAD = 512  # kWidestHead of the source


@functools.cache
def library() -> Path | None:
    """The kernels as a shared library, built unless this version of them is there; ``None`` where that is not possible."""
    compiler = shutil.which("g++")
    if compiler is None:
        logger.info("decoding without C++ kernels: there is no g++")
        return None
    try:
        path = _path()
        if not _loads(path):
            _build(compiler, path)
            ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        reason = said.decode(errors="replace") if said else str(error)
        logger.warning("decoding without C++ kernels, which is slower: %s", reason.strip())
        return None
    return path


def _path() -> Path:
    """Where this version of the kernels is kept. Raises RuntimeError where it cannot be named."""
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + _processor().encode()).hexdigest()[:16]
    directory = user_cache()
    if ":" in str(directory):
        raise RuntimeError(f"MindSpore finds no library below a path with a colon ({directory})")
    return directory / f"decode-{key}.so"


def _processor() -> str:
    """What ``-march=native`` depends on: a home directory may be shared by machines."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return features[0] if features else f"{platform.machine()} {platform.processor()}"


def _loads(path: Path) -> bool:
    """Whether a library is there and whole."""
    try:
        return bool(path.exists() and ctypes.CDLL(str(path)))
    except OSError:
        return False


def _build(compiler: str, path: Path) -> None:
    with atomic_path(path) as temporary:
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(temporary)]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS)


def supports(config: ModelConfig, kernels: Kernels, batch: int, capacity: int) -> bool:
    """Whether the kernels compute what the cells would: fp32 throughout on a CPU, and layers as :func:`_computes` says."""
    in_fp32 = kernels.operand == kernels.activation == kernels.norm == kernels.softmax == kernels.rotary == ms.float32
    architecture = config.architecture
    kinds = architecture.specifications()
    layers = all(_computes(kind, capacity) for kind in kinds) and len({_numbers(config, kind) for kind in kinds}) == 1
    ends = architecture.final_norm == kinds[0].norm and architecture.head.soft_cap is None
    one_table = len({kind.attention.position for kind in kinds}) == 1
    return in_fp32 and not kernels.fused and batch <= LARGEST_BATCH and layers and ends and one_table


def _computes(layer: LayerSpec, capacity: int) -> bool:
    """Whether the kernel of a layer is that layer: rotary attention, a gated feed-forward without biases, norms before both.

    Projections of the attention may have biases, heads of queries and keys the norm of the layer; scores are not capped.
    """
    attention, feed_forward, norm = layer.attention, layer.feed_forward, layer.norm
    if not isinstance(attention, AttentionSpec):
        return False
    plain_attention = attention == AttentionSpec(
        attention.hidden_size,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        scale=attention.scale,
        position=attention.position,
        qkv_bias=attention.qkv_bias,
        out_bias=attention.out_bias,
        window=attention.window,
        query_key_norm=None if attention.query_key_norm is None else norm,
    )
    sees_all = attention.window is None or attention.window >= capacity
    fits = isinstance(attention.position, RotarySpec) and attention.head_dim <= WIDEST_HEAD and sees_all
    if not isinstance(feed_forward, FeedForwardSpec) or feed_forward.activation not in ("silu", "gelu_tanh"):
        return False
    plain = feed_forward == FeedForwardSpec(
        feed_forward.hidden_size, feed_forward.intermediate_size, feed_forward.activation
    )
    plain = plain and not layer.added and not layer.norm_output
    return fits and plain_attention and plain and norm.kind in ("rms", "rms_one")


def _numbers(config: ModelConfig, layer: LayerSpec) -> tuple[float, ...]:
    """``Numbers`` of the source: eps, scale of the scores, what is added to the weights of norms, whether the gate is GELU."""
    feed_forward = layer.feed_forward
    gelu = isinstance(feed_forward, FeedForwardSpec) and feed_forward.activation == "gelu_tanh"
    return config.rms_norm_eps, layer.attention.scale, float(layer.norm.kind == "rms_one"), float(gelu)


class NativeDecoder(nn.Cell):
    """Decodes one token per sequence with the kernels, on the weights and the cache of a :class:`CachedDecoder`."""

    def __init__(self, decoder: CachedDecoder, config: ModelConfig, path: Path) -> None:
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.layer = P.Custom(f"{path}:decode_layer", _first, _first, func_type="aot")
        self.head = P.Custom(f"{path}:decode_head", _logits_shape, _first, func_type="aot")
        numbers = np.array(_numbers(config, config.architecture.layers[0]), np.float32)
        self.numbers = Parameter(Tensor(numbers), name="cache.numbers", requires_grad=False)
        table = _table(config)
        self.is_quantized = table is not None
        if table is not None:
            self.table = Parameter(Tensor(table), name="cache.table", requires_grad=False)
            self.no_places = Parameter(Tensor(np.zeros(1, np.int32)), name="cache.no_places", requires_grad=False)
        self.nothing = Parameter(Tensor(np.zeros(1, np.float32)), name="cache.nothing", requires_grad=False)
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        # Under this phase a cell runs what it compiled without walking through its sub-cells to look whether shapes are new.
        self.phase = "increment"

    def construct(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``tokens`` and ``positions`` int32 ``[batch, 1]`` -> logits float32 ``[batch, vocab]``."""
        lm = self.decoder.lm
        positions = self.reshape(positions, (-1,))
        cos = self.gather(self.decoder.contexts[0].cos, positions, 0)
        sin = self.gather(self.decoder.contexts[0].sin, positions, 0)
        x = lm.model.embedded(tokens, tokens.shape[0], self.reshape(positions, (-1, 1)))
        for cached in self.decoder.layers:
            attention, feed_forward = cached.layer.attention, cached.layer.feed_forward
            x = self.layer(
                x,
                cos,
                sin,
                positions,
                self.numbers,
                cached.layer.attention_norm.weight,
                self.matrix(attention.wq),
                self.matrix(attention.wk),
                self.matrix(attention.wv),
                self.matrix(attention.wo),
                cached.layer.ffn_norm.weight,
                self.matrix(feed_forward.w1),
                self.matrix(feed_forward.w3),
                self.matrix(feed_forward.w2),
                cached.cache.keys,
                cached.cache.values,
                *self.optional(attention),
                *self.codes(attention, feed_forward),
            )
        return self.head(x, self.numbers, lm.model.norm_out.weight, lm.head_weight())

    def optional(self, attention: Attention) -> tuple[Tensor, ...]:
        """Biases and norms of heads, in the order of the kernel."""
        found: tuple[Tensor, ...] = ()
        for linear in (attention.wq, attention.wk, attention.wv, attention.wo):
            found = (*found, linear.bias if linear.has_bias else self.nothing)
        if attention.norms_heads:
            return (*found, attention.query_norm.weight, attention.key_norm.weight)
        return (*found, self.nothing, self.nothing)

    def matrix(self, linear: Linear) -> Tensor:
        """The weight, or the codes in its place."""
        return linear.held.codes if linear.is_quantized else linear.weight

    def codes(self, attention: Attention, feed_forward: FeedForward) -> tuple[Tensor, ...]:
        """What codes mean, and what belongs to those of each matrix, in the order of the kernel; or nothing."""
        if not self.is_quantized:
            return ()
        found: tuple[Tensor, ...] = (self.table,)
        for linear in (attention.wq, attention.wk, attention.wv, attention.wo):
            found = (*found, *self.of_codes(linear))
        for linear in (feed_forward.w1, feed_forward.w3, feed_forward.w2):
            found = (*found, *self.of_codes(linear))
        return found

    def of_codes(self, linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
        """Scales, zeros and places of columns of one matrix."""
        if not linear.is_quantized:
            return self.nothing, self.nothing, self.no_places
        held = linear.held
        zeros = held.zeros if held.has_zeros else self.nothing
        return held.scales, zeros, held.columns if held.ordered else self.no_places


def _table(config: ModelConfig) -> np.ndarray | None:
    """What the codes of a model mean, as the kernel is told: values; for numbers from 0 on, one value more than there are codes.

    None where nothing is in codes.
    """
    names = {spec.code for layer in config.architecture.layers for spec in layer.codes}
    if not names:
        return None
    (name,) = names
    values = table_of(name)
    return np.zeros(len(values) + 1, np.float32) if name in ("uint4", "uint8") else np.array(values)


def _first(x, *_):
    """Shape or type of the output: that of the first input."""
    return x


def _logits_shape(x: list[int], numbers: list[int], norm: list[int], head: list[int]) -> list[int]:
    return [x[0], head[0]]
