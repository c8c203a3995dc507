"""Section ``pet_config``: adapters that would stand nowhere, and what cannot be tuned."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.architecture_keys import projections_in_files
from mindllm.config.document import KeyPath
from mindllm.config.run import RunConfig
from mindllm.config.tuning import mistakes

SECTION: KeyPath = ("model", "model_config", "pet_config")


def replicas_on_cpus(config: RunConfig) -> bool:
    """Whether every device is a CPU with the whole model and the whole state of the optimizer."""
    sizes = config.parallel_config
    whole = sizes.device_num == sizes.data_parallel and not config.parallel.enable_parallel_optimizer
    return config.context.device_target == "CPU" and whole


def check_tuning(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Everything about the section."""
    model = config.model.config
    pet, sizes = model.pet_config, config.parallel_config
    if pet is None:
        return
    base = model.base.architecture
    if pet.use_dora and sizes.data_parallel > 1 and sizes.model_parallel > 1:
        message = (
            f"lengths of rows are not split over replicas (data_parallel {sizes.data_parallel}) of tensor-parallel devices "
            f"(model_parallel {sizes.model_parallel}) yet; write use_dora: false, or 1 for one of them"
        )
        yield (*SECTION, "use_dora"), message
    if pet.draws and sizes.device_num > 1 and not replicas_on_cpus(config):
        key = "neftune_noise_alpha" if pet.neftune_noise_alpha is not None else "lora_dropout"
        value = getattr(pet, key)
        message = f"random numbers are drawn on one device or replicas on CPUs, not on {sizes.device_num} devices (value {value})"
        yield (*SECTION, key), f"{message}; leave the key out"
    for key, message in mistakes(pet, base.layers, projections_in_files(model), base.weight_shapes()):
        yield (*SECTION, key), message
