"""Keys of Hugging Face that are accepted as synonyms."""

from __future__ import annotations

from mindllm.config.document import Document, KeyPath, Origin, Problem, child, dotted

# Section -> key of Hugging Face -> key of mindllm.
SYNONYMS: dict[KeyPath, dict[str, str]] = {
    ("model", "model_config"): {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "n_kv_heads",
        "rope_theta": "theta",
        "max_position_embeddings": "max_position_embedding",
    },
    ("model", "model_config", "rope_scaling"): {"rope_type": "type"},
}


def rename(document: Document) -> None:
    """Gives synonyms their mindllm names, in place; a key that is given under both names becomes a problem."""
    for section, names in SYNONYMS.items():
        values = document.data
        for key in section:
            values = child(values, key)
        if isinstance(values, dict):
            for former, name in names.items():
                if former in values:
                    _rename_key(document, values, section, former, name)


def _rename_key(document: Document, values: dict, section: KeyPath, former: str, name: str) -> None:
    path = (*section, former)
    value = values.pop(former)
    if name in values:
        message = f"another name of {dotted((*section, name))}, which is given too (value {values[name]}); keep one"
        document.problems.append(Problem(document.origins.get(path), path, message))
        return
    values[name] = value
    moved: dict[KeyPath, Origin] = {}
    for known in [known for known in document.origins if known[: len(path)] == path]:
        renamed = (*section, name, *known[len(path) :])
        moved[renamed] = document.origins.pop(known)
    document.origins.update(moved)
