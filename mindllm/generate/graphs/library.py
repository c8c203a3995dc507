"""The kernels of ``decode.cc`` as a library, and which models they compute: in fp32, with layers like those of Llama.

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

import numpy as np

from mindllm.architecture.layer import LayerSpec
from mindllm.architecture.parts import AttentionSpec, FeedForwardSpec, RotarySpec
from mindllm.cache import user_cache
from mindllm.config import ModelConfig
from mindllm.files import atomic_path
from mindllm.quantize import code_values

SOURCE = Path(__file__).with_name("decode.cc")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
BUILD_SECONDS = 120
logger = logging.getLogger(__name__)
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


def supports(config: ModelConfig, capacity: int) -> bool:
    """Whether the kernels compute what the cells would on a CPU: fp32 throughout, and layers as :func:`_computes` says."""
    types = (config.compute_dtype, config.layernorm_compute_type, config.softmax_compute_type, config.rotary_dtype)
    architecture = config.architecture
    kinds = architecture.specifications()
    layers = all(_computes(kind, capacity) for kind in kinds) and len({numbers_of(config, kind) for kind in kinds}) == 1
    ends = architecture.final_norm == kinds[0].norm and architecture.head.soft_cap is None
    one_table = len({kind.attention.position for kind in kinds}) == 1
    return set(types) == {"float32"} and layers and ends and one_table


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


def numbers_of(config: ModelConfig, layer: LayerSpec) -> tuple[float, ...]:
    """``Numbers`` of the source: eps, scale of the scores, what is added to the weights of norms, whether the gate is GELU."""
    feed_forward = layer.feed_forward
    gelu = isinstance(feed_forward, FeedForwardSpec) and feed_forward.activation == "gelu_tanh"
    return config.rms_norm_eps, layer.attention.scale, float(layer.norm.kind == "rms_one"), float(gelu)


def table_of_codes(config: ModelConfig) -> np.ndarray | None:
    """What the codes of a model mean, as the kernel is told: values; for numbers from 0 on, one value more than there are codes.

    None where nothing is in codes.
    """
    names = {spec.code for layer in config.architecture.layers for spec in layer.codes}
    if not names:
        return None
    (name,) = names
    values = code_values(name)
    return np.zeros(len(values) + 1, np.float32) if name in ("uint4", "uint8") else np.array(values)
