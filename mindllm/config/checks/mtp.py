"""Cross checks of the layers that predict ahead."""

from __future__ import annotations

from collections.abc import Iterator

from mindllm.config.reading.document import KeyPath
from mindllm.config.run import RunConfig

MODEL: KeyPath = ("model", "model_config")


def check_prediction(config: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Sequences that are long enough, and embeddings that can be looked up once more as they are."""
    model = config.model.config
    depths, pet = model.num_nextn_predict_layers, model.pet_config
    if not depths:
        return
    if config.is_preference_tuning:
        kind = config.train_dataset.data_loader.type
        message = (
            f"pairs of answers ({kind}) are learnt from without layers that predict ahead (value {depths}); write 0"
        )
        yield (*MODEL, "num_nextn_predict_layers"), message
    if depths >= model.seq_length:
        message = f"must be below seq_length {model.seq_length} (value {depths})"
        yield (*MODEL, "num_nextn_predict_layers"), message
    if model.embedding_dropout:
        message = f"layers that predict ahead have none (value {model.embedding_dropout}); write 0"
        yield (*MODEL, "embedding_dropout"), message
    if pet is not None and not pet.tuner.trains_mtp:
        message = f"models with layers that predict ahead are tuned as a whole (value {pet.pet_type})"
        message += "; write full, or num_nextn_predict_layers: 0"
        yield (*MODEL, "pet_config", "pet_type"), message
    if pet is not None and pet.neftune_noise_alpha is not None:
        message = f"layers that predict ahead have no noise (value {pet.neftune_noise_alpha}); write null"
        yield (*MODEL, "pet_config", "neftune_noise_alpha"), message
