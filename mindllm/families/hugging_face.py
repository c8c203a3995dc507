"""Hugging Face's ``config.json`` as a :class:`ModelConfig`, and the way back. ``families`` says what it holds.

A GGUF file stands for the directory that its model had: wherever one is taken, the other is.
Values of a ``config.json`` that no model has are refused before anything is computed from them, whatever family it is.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindllm import outside
from mindllm.config.dataset import TOKENIZER_FILES
from mindllm.config.generation import DEFAULT_TOP_K
from mindllm.config.model import ModelConfig
from mindllm.config.quantization import KEY, QuantizationConfig, read_quantization
from mindllm.errors import UserError, shortened
from mindllm.families import FAMILIES, family_named, family_of
from mindllm.families.family import Content, Family, Required
from mindllm.families.shared_keys import check_rope_values
from mindllm.families.weight_table import weight_names
from mindllm.gguf import architecture_config, gguf_file, read_header
from mindllm.logs import warn_once

MOST_LAYERS = 10_000
MOST = 2**31 - 1
LARGEST = 1e30  # of numbers with a fraction: bases of rotations reach 1e9
MOST_PARAMETERS = 10**14
DEEPEST = 20  # objects in objects

LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
WIDTHS = ("hidden_size", "n_embd", "intermediate_size", "ffn_hidden_size", "n_inner")
VOCABULARIES = ("vocab_size", "padded_vocab_size")
HEADS = ("num_attention_heads", "n_head", "num_key_value_heads", "multi_query_group_num", "head_dim", "kv_channels")
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "sliding_window")
POSITIVE = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "rope_theta",
    "rotary_emb_base",
    "rope_ratio",
)
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
GENERATION_KEYS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("num_beams", "length_penalty", "early_stopping", "max_new_tokens"),
)
"""Keys of generation_config.json that section ``generation`` has by the same name and meaning."""
UNSUPPORTED_GENERATION = (
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids"),
    *(
        "min_length",
        "min_new_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "guidance_scale",
    ),
    *("begin_suppress_tokens", "sequence_bias", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *(
        "exponential_decay_length_penalty",
        "num_beam_groups",
        "diversity_penalty",
        "penalty_alpha",
        "watermarking_config",
    ),
)
"""Keys of generation_config.json that change texts and have no counterpart here."""


def refuse_implausible(path: Path, content: dict[str, Any]) -> None:
    """Check sizes and numbers of the content of ``path``. Absent keys and null are checked by the family.

    Raises:
        UserError: names the file, the key, the value and valid values.
    """
    _refuse_deep(path, content)
    for key in (*LAYERS, *WIDTHS, *VOCABULARIES, *HEADS, *LENGTHS):
        unused = key == "sliding_window" and content.get("use_sliding_window") is False
        value = None if unused else content.get(key)
        most = MOST_LAYERS if key in LAYERS else MOST
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise UserError(f"{path}: {key}: must be a whole number from 1 to {most} (value {shortened(value)})")
    for key in POSITIVE:
        value = content.get(key)
        is_number = type(value) in (int, float)
        if value is not None and not (is_number and math.isfinite(value) and 0 < value <= LARGEST):
            raise UserError(f"{path}: {key}: must be a number above 0 (value {shortened(value)})")
    # the weights that the sizes make at least, very roughly: one square and three matrices of the feed-forward in
    # each layer
    layers, hidden, vocabulary = (_first(content, keys) for keys in (LAYERS, ("hidden_size", "n_embd"), VOCABULARIES))
    inner = _first(content, ("intermediate_size", "ffn_hidden_size", "n_inner"))
    parameters = layers * hidden * (hidden + 3 * inner) + vocabulary * hidden
    if parameters > MOST_PARAMETERS:
        raise UserError(
            f"{path}: {_named(content, LAYERS)}, {_named(content, WIDTHS)}, {_named(content, VOCABULARIES)}: make about "
            f"{parameters:.1e} parameters; no model has over {MOST_PARAMETERS:.0e}"
        )


def _refuse_deep(path: Path, content: dict[str, Any]) -> None:
    level: list[tuple[str, Any]] = list(content.items())
    for _ in range(DEEPEST):
        level = [
            (key, entry)
            for key, value in level
            for entry in (list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [])
        ]
        if not level:
            return
    raise UserError(f"{path}: {level[0][0]}: is nested over {DEEPEST} deep, which no value of a model is")


def _first(content: dict[str, Any], keys: tuple[str, ...]) -> int:
    return next((content[key] for key in keys if content.get(key) is not None), 0)


def _named(content: dict[str, Any], keys: tuple[str, ...]) -> str:
    return ", ".join(f"{key} {content[key]}" for key in keys if content.get(key) is not None)


def is_hugging_face(directory: Path | str) -> bool:
    """Return True if ``directory`` is a model directory of Hugging Face (not a checkpoint of mindllm) or a GGUF file."""
    if (Path(directory) / CONFIG).is_file():
        return not (Path(directory) / "manifest.json").exists()
    return gguf_file(directory) is not None


def described_by(directory: Path | str) -> Path:
    """Return the file that describes the model of ``directory``: its ``config.json``, or a GGUF file."""
    return gguf_file(directory) or Path(directory) / CONFIG


def tokenizer_in(directory: Path | str) -> Path | None:
    """Return the tokenizer file in ``directory``, or a GGUF file, which contains one; None without a tokenizer."""
    if gguf := gguf_file(directory):
        return gguf
    return next((Path(directory) / name for name in TOKENIZER_FILES if (Path(directory) / name).is_file()), None)


def read_model_config(directory: Path | str) -> ModelConfig:
    """Return the architecture of ``directory/config.json``. The fields that the file decides are set.

    Raises:
        UserError: the file is missing, invalid JSON, incomplete, or not supported.
    """
    path, content = _described(directory)
    refuse_implausible(path, content)
    model = _family(path, content).model(path, content)
    check_rope_values(path, content, model)
    if path.name == CONFIG:
        model = _without_absent_layers(path.parent, model)
    ends = _end_of_text(path.with_name(GENERATION_CONFIG) if path.name == CONFIG else None, content)
    if ends is None:
        return model
    if not isinstance(ends, int) and not (isinstance(ends, list) and ends and all(type(end) is int for end in ends)):
        raise UserError(f"{path}: eos_token_id: must be a token, or a list of tokens (value {shortened(ends)})")
    return model.model_copy(update={"eos_token_id": tuple(ends) if isinstance(ends, list) else ends})


def _without_absent_layers(directory: Path, model: ModelConfig) -> ModelConfig:
    """Return the content without multi-token prediction layers that were not saved, as by transformers."""
    names = weight_names(directory) if model.num_nextn_predict_layers else None
    if names is None or any(name.startswith(f"model.layers.{model.num_layers}.") for name in names):
        return model
    return model.model_copy(update={"num_nextn_predict_layers": 0})


def family_in(directory: Path | str) -> Family:
    """Return the family of a Hugging Face directory; errors as in :func:`read_model_config`."""
    return _family(*_described(directory))


def quantization_in(directory: Path | str) -> QuantizationConfig | None:
    """Return the quantization of the projections in a Hugging Face directory; None if they are not quantized.

    Raises:
        UserError: the form is not supported.
    """
    path, content = _described(directory)
    return None if content.get(KEY) is None else read_quantization(path, content[KEY])


def _described(directory: Path | str) -> tuple[Path, dict[str, Any]]:
    """Return the file that describes a model, and its content; of a GGUF file, as a ``config.json`` has it."""
    path = described_by(directory)
    return path, read_json(path) if path.name == CONFIG else architecture_config(read_header(path))


def read_generation(directory: Path | str) -> dict[str, Any]:
    """Return the keys of section ``generation`` that a directory's generation_config.json sets, as transformers applies them.

    Keys that draw tokens have no effect without ``do_sample: true``. Keys that are set and not supported are logged.
    """
    path = Path(directory) / GENERATION_CONFIG
    content = read_json(path) if path.is_file() else {}
    options = {key: content[key] for key in GENERATION_KEYS if content.get(key) is not None}
    if options.get("do_sample") is True:
        options.setdefault("top_k", DEFAULT_TOP_K)
    elif options.get("temperature") == 0:
        del options["temperature"]  # asks for what do_sample: false does
    if unsupported := [key for key in UNSUPPORTED_GENERATION if content.get(key) not in (None, False, 0, 1.0, [], {})]:
        warn_once(__name__, f"{path}: not supported and ignored: {', '.join(unsupported)}")
    return options


def config_json(model: ModelConfig, dtype: str, special_tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``config.json`` for weights of ``dtype``, readable by old and new ``transformers``.

    ``special_tokens`` has ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.

    Raises:
        UserError: no family has such a model.
    """
    try:
        family = family_of(model)
        content = family.content(model)
        for key in family.unsaid:
            value = getattr(model, key)
            if value != ModelConfig.model_fields[key].default:
                raise UserError(f"the files of {family.name} cannot say {key} (value {value})")
    except UserError as error:
        raise UserError(f"model.model_config cannot be written as {CONFIG}: {error}") from None
    return {**content, **special_tokens, "torch_dtype": dtype, "use_cache": True}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise UserError if there is none."""
    try:
        content = outside.read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no object of keys and values")
    return content


def _family(path: Path, content: dict[str, Any]) -> Family:
    kind = content.get("model_type")
    if kind is None:
        return FAMILIES[0]  # what old files of Llama leave out
    try:
        return family_named(kind) if isinstance(kind, str) else family_named(str(kind))
    except UserError:
        names = ", ".join(family.name for family in FAMILIES)
        near = nearest_family(FAMILIES, path, content) if isinstance(kind, str) else ""
        raise UserError(
            f"{path}: model_type: this model is not supported (value {shortened(kind)}); supported: {names}"
            f"{f'; {near}' if near else ''}"
        ) from None


def _end_of_text(generation: Path | None, content: dict[str, Any]) -> Any:
    """Return the tokens that end a text, of generation_config.json and of config.json; None where both name none."""
    first = read_json(generation).get("eos_token_id") if generation and generation.is_file() else None
    named = [ends for ends in (first, content.get("eos_token_id")) if ends not in (None, -1)]
    if len(named) < 2:
        return next(iter(named), None)
    first, second = (ends if isinstance(ends, list) else [ends] for ends in named)
    together = [*first, *(end for end in second if end not in first)]
    return together[0] if len(together) == 1 else together


ABOUT_FILES = re.compile(
    r"_.*|.*_token_id|architectures|auto_map|model_type|torch_dtype|dtype|transformers_version|use_cache|pretraining_tp|"
    r"attn_implementation|output_\w+|return_dict|id2label|label2id|task_specific_params|tokenizer_class|initializer_range|"
    r"\w*_?(dropout|pdrop)(_p|_prob)?"
)
"""Keys without effect on the computation: about files, tokens and training."""
SHOWN = 8  # keys of each kind
USUAL_ABSENT = 2  # keys with defaults that files of a family often leave out
FEWEST = 4  # a family that reads fewer keys is not near


@dataclass(frozen=True)
class Fit:
    """What a family makes of a file.

    Attributes:
        read: keys it reads.
        unread: keys it does not know.
        missing: keys it needs.
        refused: keys whose value it does not compute.
        absent: keys its own files have.
    """

    family: Family
    read: frozenset[str]
    unread: tuple[str, ...]
    missing: tuple[str, ...]
    refused: tuple[str, ...]
    absent: int

    @property
    def distance(self) -> float:
        """How many keys are in the way; of those that are absent some always are."""
        return len(self.unread) + 2 * len(self.refused) + max(0, self.absent - USUAL_ABSENT) / 2


class _Watched(dict[str, Any]):
    """A dictionary that remembers which of its keys were asked for."""

    def __init__(self, content: Content) -> None:
        super().__init__(content)
        self.asked: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def fit_of(family: Family, path: Path, content: Content) -> Fit:
    """Return what ``family`` makes of ``content``, which is of another ``model_type``."""
    needed = [name for name, default in family.keys.values() if isinstance(default, Required)]
    readable = (
        {name for name, _ in family.keys.values()} | {*family.only, *family.written, KEY} | _read(family, path, content)
    )
    keys = [
        key for key, value in content.items() if value not in (None, False, [], {}) and not ABOUT_FILES.fullmatch(key)
    ]
    refused = [
        key for key, allowed in family.only.items() if content.get(key) is not None and content[key] not in allowed
    ]
    return Fit(
        family,
        frozenset(key for key in keys if key in readable),
        tuple(key for key in keys if key not in readable),
        tuple(dict.fromkeys(key for key in needed if content.get(key) is None)),
        tuple(refused),
        len({name for name, _ in family.keys.values() if name not in content}),
    )


def nearest_family(families: Iterable[Family], path: Path, content: Content) -> str:
    """Return a sentence on the family that is nearest, and what differs; empty where none is near."""
    fits = [fit_of(family, path, content) for family in families]
    near = [fit for fit in fits if len(fit.read) >= FEWEST and not fit.missing]
    if not near:
        return ""
    kind = str(content.get("model_type"))
    best = min(near, key=lambda fit: (fit.distance, -_likeness(kind, fit.family), -len(fit.read)))
    differing = "; ".join(_differences(best, content))
    if differing:
        return f"nearest is {best.family.name}, which {differing}"
    return f"nearest is {best.family.name}, which knows every key of this file, though it may compute something else"


def _read(family: Family, path: Path, content: Content) -> set[str]:
    """Return the keys that the function of a family reads, up to the first error."""
    watched = _Watched(content)
    try:
        family.read(path, watched)
    except Exception:
        return watched.asked
    return watched.asked


def _likeness(kind: str, family: Family) -> float:
    names = (family.name, *family.aliases)
    return max(difflib.SequenceMatcher(None, kind.lower(), name.lower()).ratio() for name in names)


def _differences(fit: Fit, content: Content) -> Iterator[str]:
    if fit.unread:
        yield f"does not know {_shown_keys(fit.unread, content)}"
    if fit.refused:
        yield f"does not compute {_shown_keys(fit.refused, content)}"


def _shown_keys(keys: tuple[str, ...], content: Content) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(f"{shortened(key)} {shortened(content[key], 30)}" for key in keys[:SHOWN]) + more
