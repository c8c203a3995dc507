"""Cross checks of a configuration: what its sections ask of each other. A finding is where a mistake stands, and what it is."""

from __future__ import annotations

from mindllm.config.reading.document import KeyPath

Finding = tuple[KeyPath, str]
MODEL: KeyPath = ("model", "model_config")
MESH: KeyPath = ("parallel_config",)
