"""Other people's weights, read and written. Two functions are the entry points:

- ``open_weights(path)`` opens any format without reading values: Hugging Face directories (safetensors or pickled tensors, plain
or
  quantized), GGUF, MindFormers' checkpoints, and checkpoints of mindllm.
- ``write_weights(directory, model, weights)`` writes a Hugging Face directory.

``find_pretrained(config)`` returns the weights that a run starts from, including adapters of PEFT. The other functions are the
commands ``mindllm weights``, ``models`` and ``quantize``. One file reads each format: ``hugging_face``, ``pickled``,
``gguf_file``, ``mindspore_file``, ``mindformers``, ``quantized``, ``peft`` and ``peft_reading``; ``family_weights`` converts
names and layouts.
"""

from mindllm.weight_files.adapters import (
    Adapter,
    fingerprint,
    full_weights,
    has_frozen_weights,
    initial_weights,
    merge_adapter,
    unmerge_adapter,
)
from mindllm.weight_files.convert import export_adapter, export_weights, import_weights, merge, unmerge
from mindllm.weight_files.describe import describe_weights, description_table, list_models
from mindllm.weight_files.hugging_face import QuantizedExport, read_hugging_face, write_weights
from mindllm.weight_files.opening import OpenedWeights, latest_weights, open_weights
from mindllm.weight_files.pretrained import Pretrained, base_record, find_pretrained, merged_pretrained
from mindllm.weight_files.quantize import QuantizeOptions, quantize_weights
from mindllm.weight_files.quantized import packed_weights

__all__ = [
    "Adapter",
    "OpenedWeights",
    "Pretrained",
    "QuantizeOptions",
    "QuantizedExport",
    "base_record",
    "describe_weights",
    "description_table",
    "export_adapter",
    "export_weights",
    "find_pretrained",
    "fingerprint",
    "full_weights",
    "has_frozen_weights",
    "import_weights",
    "initial_weights",
    "latest_weights",
    "list_models",
    "merge",
    "merge_adapter",
    "merged_pretrained",
    "open_weights",
    "packed_weights",
    "quantize_weights",
    "read_hugging_face",
    "unmerge",
    "unmerge_adapter",
    "write_weights",
]
