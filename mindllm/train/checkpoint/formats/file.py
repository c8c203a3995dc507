"""One file of weights, whatever its format: which reader it wants stands in its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindllm.errors import UserError
from mindllm.train.checkpoint.formats.mindspore_file import checkpoint_tensors
from mindllm.train.checkpoint.formats.pickled import pickled_tensors
from mindllm.train.checkpoint.tensors import stored_tensors

# suffix: (what such a file is, its reader)
READERS: dict[str, tuple[str, Callable[[Path], Mapping[str, Any]]]] = {
    ".safetensors": ("a safetensors file", stored_tensors),
    ".ckpt": ("a checkpoint file of MindSpore", checkpoint_tensors),
    ".bin": ("a file of pickled tensors", pickled_tensors),
    ".pt": ("a file of pickled tensors", pickled_tensors),
    ".pth": ("a file of pickled tensors", pickled_tensors),
}


def tensors_of_file(path: Path) -> dict[str, Any]:
    """The tensors of a file by the names it gives them, each a ``TensorSource`` with its ``path``; none is read yet.

    Raises:
        UserError: no such file, no format known here, a damaged file, or one that holds more than tensors.
    """
    if path.suffix not in READERS:
        raise UserError(f"{path}: not a file of weights; known are {', '.join(READERS)}")
    kind, read = READERS[path.suffix]
    try:
        return dict(read(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not {kind}, or a part of one ({error}); get it again") from None
