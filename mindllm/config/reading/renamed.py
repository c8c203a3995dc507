"""Other names of keys and values: those of Hugging Face are synonyms, former ones of ours are read for one release."""

from __future__ import annotations

import logging

from mindllm.config.reading.document import Document, KeyPath, Origin, Problem, at, child, dotted

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

# The same for keys that mindllm had before: read, and answered with a line that has the new name.
FORMER: dict[KeyPath, dict[str, str]] = {("model", "model_config"): {"quantised_base": "quantized_base"}}
# Key -> another word for a value of it -> the value.
WORDS: dict[KeyPath, dict[str, str]] = {
    ("model", "model_config", "quantized_base"): {"codes": "keep", "float32": "dequantize"},
}

logger = logging.getLogger(__name__)


def rename(document: Document) -> None:
    """Give synonyms and former names those of mindllm, in place; a key that is given under both names becomes a problem."""
    _tell_former(document)
    _rename_keys(document, SYNONYMS)
    _rename_keys(document, FORMER)
    for path, words in WORDS.items():
        section = at(document.data, path[:-1])
        if isinstance(section, dict) and isinstance(value := section.get(path[-1]), str):
            section[path[-1]] = words.get(value, value)


def _tell_former(document: Document) -> None:
    for section, names in FORMER.items():
        values = at(document.data, section)
        for former in names.keys() & (values.keys() if isinstance(values, dict) else ()):
            path, new = (*section, former), (*section, names[former])
            word = WORDS.get(new, {}).get(str(values[former]), values[former])
            place = document.origins.get(path)
            where = f"{place}: " if place else ""
            logger.warning("%s%s: a former name; write %s: %s", where, dotted(path), dotted(new), word)


def _rename_keys(document: Document, table: dict[KeyPath, dict[str, str]]) -> None:
    for section, names in table.items():
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
