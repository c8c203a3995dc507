"""Definition of a model family: reading and writing its ``config.json``, and weight names. One file per family has the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mindllm.config.model import ModelConfig, layer_types
from mindllm.config.quantization import KEY, read_quantization
from mindllm.errors import UserError, shortened
from mindllm.families.weight_table import WeightTable

Content = dict[str, Any]
LONGEST_SAMPLE = 4096  # of a run that gives no seq_length: contexts of 131072 tokens are for those who ask for them


class Required:
    """Marker instead of a default for required keys."""


REQUIRED = Required()


EMPTY: tuple[Any, ...] = (None, False, {}, [], "")  # and 0, which equals False
COMPUTES = re.compile(
    r"rope|rotary|yarn|ntk|alibi|nope|position|attn|attention|window|sink|softcap|logit|multiplier|scal(e|ing)|norm|bias|mlp|"
    r"expert|moe|router|residual|activation|hidden_act|head|layer|mup|transformers_weights"
)
"""Keys of ``config.json`` that may change the computation. Others describe files, training or generation."""
WITHOUT_EFFECT = frozenset(
    (
        *(
            "_attn_implementation",
            "_attn_implementation_internal",
            "_attn_implementation_autoset",
            "attn_implementation",
        ),
        *("flash_attn", "use_flash_attn", "_flash_attn_2_enabled", "softmax_in_fp32", "attention_softmax_in_fp32"),
        *(
            "attention_probs_dropout_prob",
            "attn_pdrop",
            "attn_dropout_prob",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
        ),
        *("output_attentions", "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef", "scale_loss"),
        *(
            "apply_query_key_layer_scaling",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "reorder_and_upcast_attn",
        ),
        *(
            "summary_activation",
            "head_dim",
            "qk_head_dim",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
        ),
        *(
            "n_head",
            "n_layer",
            "num_layers",
            "max_position_embeddings",
            "n_positions",
            "rms_norm_eps",
            "layer_norm_eps",
        ),
        *(
            "layer_norm_epsilon",
            "layer_types",
            "sliding_window",
            "max_window_layers",
            "original_max_position_embeddings",
        ),
        *(
            "sliding_window_pattern",
            "_sliding_window_pattern",
            "mlp_only_layers",
            "partial_rotary_factor",
            "rope_theta",
        ),
    )
)
"""Keys with such a name and no effect: implementation, training, or sizes that are read elsewhere."""


class ReadKeys(dict):
    """The content of a ``config.json`` that records which keys are read."""

    def __init__(self, content: Content) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: ``model_type`` of its ``config.json``, also the value of the key ``model_type`` of mindllm.
        network: the class in ``architectures``.
        keys: key of mindllm to key of ``config.json`` and its default, which is that of the family's code.
        weights: the names in its files.
        aliases: other values of ``model_type`` for this family.
        named: whether its models need a ``model_type``; those of the first family do not.
        fixed: keys of mindllm with the same value in all models of the family.
        only: valid values of keys of ``config.json`` that are set.
        written: additional constants of its files.
        read: returns additional keys of mindllm from a path (for errors) and the content of the file.
        write: returns additional keys of ``config.json``.
        unsaid: keys that a run may train with and the file cannot express: such a model is not written.
    """

    name: str
    network: str
    keys: Mapping[str, tuple[str, Any]]
    weights: WeightTable
    named: bool = True
    aliases: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Path, Content], dict[str, Any]] = lambda path, content: {}
    write: Callable[[ModelConfig], Content] = lambda model: {}
    unsaid: tuple[str, ...] = ()

    def model(self, path: Path, content: Content) -> ModelConfig:
        """Return the architecture of the file at ``path``. The fields that the file decides are set.

        Raises:
            UserError: the content is incomplete or not supported.
        """
        for key, allowed in self.only.items():
            value = content.get(key)
            if value is not None and value not in allowed:
                supported = " or ".join(map(str, allowed)) or "nothing"
                raise UserError(
                    f"{path}: {key}: this model is not supported (value {shortened(value)}); supported: {supported}"
                )
        missing = [
            name for name, default in self.keys.values() if isinstance(default, Required) and content.get(name) is None
        ]
        if missing:
            raise UserError(f"{path}: {', '.join(missing)}: missing; it is not the {path.name} of a {self.name} model")
        content = ReadKeys(content)
        quantized = content.get(KEY)
        fields = {ours: given_or(content, name, default) for ours, (name, default) in self.keys.items()}
        fields |= {**self.fixed, **self._read(path, content), **({"model_type": self.name} if self.named else {})}
        fields |= {} if quantized is None else {KEY: read_quantization(path, quantized)}
        self._refuse_unread(path, content)
        length = fields["max_position_embedding"]
        fields["seq_length"] = min(length, LONGEST_SAMPLE) if isinstance(length, int) else 1
        try:
            model = ModelConfig.model_validate(fields)
        except ValidationError as error:
            details = error.errors(include_url=False)[0]
            key = ".".join([self.their_name(str(details["loc"][0])), *map(str, details["loc"][1:])])
            raise UserError(f"{path}: {key}: {details['msg']} (value {shortened(details['input'])})") from None
        filled = {key: getattr(model, key) for key in ("n_kv_heads", "head_dim")}  # set, whether left out or not
        return model.model_copy(update=filled).name_projections(self.weights.projections)

    def _refuse_unread(self, path: Path, content: ReadKeys) -> None:
        """Raise UserError for the first unread key whose name suggests an effect on the computation."""
        named = {name for name, _ in self.keys.values()} | self.only.keys() | self.written.keys()
        for key in sorted(content.keys() - content.read - named - WITHOUT_EFFECT):
            if content[key] not in EMPTY and COMPUTES.search(key):
                raise UserError(
                    f"{path}: {key}: unknown for {self.name} (value {shortened(content[key])}); remove the key if it does not "
                    "change what the model computes"
                )

    def _read(self, path: Path, content: Content) -> Content:
        """Return the additional keys of a family; raise UserError for a value of an unexpected type."""
        try:
            return self.read(path, content)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            reason = shortened(str(error), 200)
            raise UserError(
                f"{path}: a value has a form that cannot be read ({type(error).__name__}: {reason})"
            ) from error

    def content(self, model: ModelConfig) -> Content:
        """Return the content of ``config.json`` without dtype and special tokens. Reading it may give another model."""
        return {
            "architectures": [self.network],
            "model_type": self.name,
            **{name: getattr(model, ours) for ours, (name, _) in self.keys.items()},
            **self.written,
            **self.write(model),
        }

    def differs(self, model: ModelConfig) -> list[str]:
        """Return the keys whose values this family cannot express; empty if the family has such a model."""
        try:
            again = self.model(Path("config.json"), self.content(model))
        except UserError:
            return ["model_type"]
        again = again.model_copy(update={key: getattr(model, key) for key in (*TRAINING_KEYS, *self.unsaid)})
        if again.architecture == model.architecture:
            return []
        ignored = RUN_KEYS | (PATTERNS if layer_types(again) == layer_types(model) else set())
        keys = [key for key in type(model).model_fields if getattr(again, key) != getattr(model, key)]
        return [key for key in keys if key not in ignored] or ["num_layers"]

    def their_name(self, key: str) -> str:
        """Return the name in ``config.json`` of a key of ``model.model_config``."""
        named = {ours: name for ours, (name, _) in self.keys.items()} | {"theta": "rope_theta"}
        return named.get(key, key)


TRAINING_KEYS = (
    *(
        "mtp_loss_factor",
        "aux_loss_types",
        "aux_loss_factors",
        "z_loss_factor",
        "capacity_factor",
        "moe_grouped_gemm",
        "moe_token_dispatcher_type",
        "topk_bias_update_rate",
    ),
    *("embedding_dropout", "attention_dropout", "hidden_dropout"),
)
"""Keys about training: balance of experts, and dropout."""
RUN_KEYS = frozenset(
    {
        *(
            "model_type",
            "seq_length",
            "compute_dtype",
            "fp32_residual_connection",
            "layernorm_compute_type",
            "softmax_compute_type",
            "rotary_dtype",
        ),
        *("use_flash_attention", "loss_chunks", "bos_token_id", "eos_token_id", "pad_token_id", "offset"),
        *TRAINING_KEYS,
        *(KEY, "quantized_base"),
        *(
            "pp_interleave_num",
            "fine_grain_interleave",
            "initializer_range",
            "multiple_of",
            "ffn_dim_multiplier",
            "param_init_type",
        ),
    }
)
"""Keys of ``model_config`` that a run chooses and that are not part of the architecture."""


PATTERNS = {"layer_types", "sliding_window_pattern"}  # two ways of saying which layers have a window


def given_or(content: Content, key: str, default: Any) -> Any:
    """Return the value of a key, or the default if it is absent or null."""
    value = content.get(key)
    return default if value is None else value
