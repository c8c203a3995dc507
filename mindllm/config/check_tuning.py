"""Section ``pet_config``: adapters that would stand nowhere, and what cannot be tuned."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.architecture_keys import projections_in_files
from mindllm.config.document import KeyPath
from mindllm.config.latent_attention import LatentAttentionSpec
from mindllm.config.run import RunConfig
from mindllm.config.tuning import PetConfig, is_trained, mistakes

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
    model, sizes = config.model.config, config.parallel_config
    kinds = model.base.architecture.kinds()
    if pet.pet_type == "lora" and any(isinstance(kind.attention, LatentAttentionSpec) for kind in kinds):
        yield (*SECTION, "pet_type"), "latent attention has no adapters yet (value lora); write pet_type: full"
    if model.topk_bias_update_rate and not is_trained(pet, f"model.layers.{model.num_layers - 1}.{ROUTER_BIAS}"):
        message = f"changes biases of routers, which are frozen (value {model.topk_bias_update_rate}); write 0"
        yield (*MODEL, "topk_bias_update_rate"), message
    if pet.use_dora and sizes.data_parallel > 1 and sizes.model_parallel > 1:
        message = (
            f"lengths of rows are not split over replicas (data_parallel {sizes.data_parallel}) of tensor-parallel devices "
            f"(model_parallel {sizes.model_parallel}) yet; write use_dora: false, or 1 for one of them"
        )
        yield (*SECTION, "use_dora"), message
