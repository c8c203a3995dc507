"""Section ``pet_config``: adapters that would stand nowhere, and what cannot be tuned."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.architecture_keys import projections_in_files
from mindllm.config.document import KeyPath
from mindllm.config.run import RunConfig
from mindllm.config.tuning import ADALORA, BOTTLENECK, GALORE, LISA, PetConfig, mistakes

MODEL: KeyPath = ("model", "model_config")
SECTION: KeyPath = (*MODEL, "pet_config")
ROUTER_BIAS = "feed_forward.router.bias"


def check_tuning(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Everything about the section, and adapters that are given to no model."""
    if config.adapter_id and not config.load_adapter:
        yield (
            ("adapter_id",),
            f"chooses one of the adapters below load_adapter, which is empty (value {config.adapter_id})",
        )
    model = config.model.config
    pet = model.pet_config
    if pet is None:
        return
    yield from _not_computed(config, pet)
    base = model.base.architecture
    for key, message in mistakes(pet, base.layers, projections_in_files(model), base.weight_shapes()):
        yield (*SECTION, key), message


def _not_computed(config: RunConfig, pet: PetConfig) -> Iterator[tuple[KeyPath, str]]:
    """What is not here yet, alone or on several devices."""
    model = config.model.config
    if pet.pet_type == BOTTLENECK and config.export_hf.directory:
        message = f"no Hugging Face model has bottlenecks (value {config.export_hf.directory}); leave it out"
        yield ("export_hf", "directory"), message
    if pet.pet_type in (GALORE, LISA):
        yield from _no_experts(config, pet)
    if pet.pet_type == ADALORA:
        yield from _no_budget(config, pet)
    if model.topk_bias_update_rate and any(ROUTER_BIAS in layer.frozen for layer in model.architecture.layers):
        message = f"changes biases of routers, which are frozen (value {model.topk_bias_update_rate}); write 0"
        yield (*MODEL, "topk_bias_update_rate"), message


def _no_budget(config: RunConfig, pet: PetConfig) -> Iterator[tuple[KeyPath, str]]:
    """The budget of ranks falls until the end, which has to be known."""
    steps = config.runner_config.train_steps
    if steps is None:
        yield (
            ("runner_config", "train_steps"),
            "the budget of pet_type adalora falls until the end of the run; write its steps",
        )
    elif pet.adalora_tinit + pet.adalora_tfinal >= steps:
        message = f"leaves no steps between adalora_tinit {pet.adalora_tinit} and adalora_tfinal {pet.adalora_tfinal}"
        yield ("runner_config", "train_steps"), f"{message} (value {steps}); write more"


def _no_experts(config: RunConfig, pet: PetConfig) -> Iterator[tuple[KeyPath, str]]:
    """Experts are one weight of three dimensions, which is neither projected nor drawn."""
    if config.model.config.expert_num > 1:
        message = f"experts are not trained with pet_type {pet.pet_type} yet (value {pet.pet_type})"
        yield (*SECTION, "pet_type"), f"{message}; write pet_type: full, or lora"
