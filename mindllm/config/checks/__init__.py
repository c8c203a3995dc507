"""Cross checks between sections of a configuration. A finding is the path of the key at fault and a message."""

from __future__ import annotations

from mindllm.config.reading.document import KeyPath

Finding = tuple[KeyPath, str]
MODEL: KeyPath = ("model", "model_config")
MESH: KeyPath = ("parallel_config",)
