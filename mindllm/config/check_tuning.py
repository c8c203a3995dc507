"""Section ``pet_config``: adapters that would stand nowhere, and what cannot be tuned."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.architecture_keys import projections_in_files
from mindllm.config.document import KeyPath
from mindllm.config.run import RunConfig
from mindllm.config.tuning import mistakes

SECTION: KeyPath = ("model", "model_config", "pet_config")


def check_tuning(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Everything about the section."""
    model = config.model.config
    pet = model.pet_config
    if pet is None:
        return
    base = model.base.architecture
    for key, message in mistakes(pet, base.layers, projections_in_files(model), base.weight_shapes()):
        yield (*SECTION, key), message
