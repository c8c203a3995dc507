"""GGUF, llama.cpp's single-file format: its header, and the architecture in Hugging Face's terms."""

from mindllm.gguf.header import (
    SUFFIX,
    TYPES,
    Header,
    StoredBlocks,
    gguf_file,
    gguf_files,
    read_header,
)
from mindllm.gguf.model import (
    FREQUENCIES,
    GgufArchitecture,
    architecture_config,
    find_architecture,
    hugging_face_name,
    llama3_divisors,
)

__all__ = [
    "FREQUENCIES",
    "SUFFIX",
    "TYPES",
    "GgufArchitecture",
    "Header",
    "StoredBlocks",
    "architecture_config",
    "find_architecture",
    "gguf_file",
    "gguf_files",
    "hugging_face_name",
    "llama3_divisors",
    "read_header",
]
