"""PEFT adapters as mindllm's: an equal update of the weights, in the form that ``pet_config`` describes.

PEFT may give each projection its own rank and scale, leave layers out, adapt the embedding and the head, or change the base when
the adapter is created. Here all projections share a rank and a scale, in all layers. The conversion is exact: ranks are padded
with zeros, scales move into the second matrix, and a changed base becomes additional ranks.

PiSSA (Meng et al., 2024) subtracts the largest singular values from the base, OLoRA (Buyukakyuz, 2024) the first columns of a QR
decomposition, so that base and adapter start as the original weight.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindllm.architecture.adapters import MAGNITUDE, VALUES, WEIGHT, A, B, is_adapter_weight
from mindllm.config import ModelConfig
from mindllm.config.tuning import PetConfig
from mindllm.errors import UserError, shortened
from mindllm.families.hugging_face import read_json
from mindllm.families.weight_table import EMBEDDING, HEAD, Weight
from mindllm.train.checkpoint.tensors import LazyTensor, TensorSource, read_metadata
from mindllm.weight_files.adapters import Adapter, Weights, row_lengths
from mindllm.weight_files.family_weights import FamilyWeights
from mindllm.weight_files.hugging_face import read_tensor_file
from mindllm.weight_files.peft import (
    ADALORA_KEYS,
    CONFIG_FILE,
    FINGERPRINT,
    PEFT_ADALORA,
    PREFIX,
    WEIGHTS_FILE,
    recorded_base,
)

logger = logging.getLogger(__name__)
PEFT_TYPES = ("LORA", PEFT_ADALORA)
SMALL = 256  # matrices of which all singular values are computed
SMALLEST_GAP = 1e-5  # relative distance of the singular values at the cut: closer ones do not determine their vectors
UNDETERMINED = (
    "so its update is not determined; convert the adapter in the program that trained it "
    "(path_initial_model_for_weight_conversion)"
)
MERGE_WITH_PEFT = "merge the adapter with PEFT (merge_and_unload) and load the merged model"
CONVERT_WITH_PEFT = (
    "convert the adapter in the program that trained it: save_pretrained(DIRECTORY, "
    "path_initial_model_for_weight_conversion=INITIAL_ADAPTER)"
)
CHANGES_BASE = ("pissa", "olora")
"""Values of ``init_lora_weights`` that subtract an update from the base, which follows from the base alone."""
ALLOWED: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision")),
    **dict.fromkeys(("inference_mode", "r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora", "use_dora")),
    # which modules have an adapter, and of which rank: the tensors of the file decide
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "ensure_weight_tying")),
    # details of an initialization, which init_lora_weights selects, or of an execution
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size")),
    **dict.fromkeys(("megatron_core", "runtime_config")),
    **dict.fromkeys((*ADALORA_KEYS.values(), "total_step")),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica", *CHANGES_BASE),
}
"""Keys of ``adapter_config.json`` with the values that are read; None: every value."""
EMPTY: tuple[Any, ...] = (None, False, {}, [], "")
"""Values by which PEFT says that a feature is not in use."""
TENSOR_KINDS = {
    "lora_A.weight": "first",
    "lora_B.weight": "second",
    "lora_A": "first",
    "lora_B": "second",
    "lora_E": "values",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "lora_embedding_A": "first",
    "lora_embedding_B": "second",
    "base_layer.weight": "base_layer",
}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Update:
    """The low-rank update of a module: ``scale * second @ first``, ``[out, in]``; of an embedding the transpose.

    Attributes:
        values: the diagonal between both matrices (AdaLoRA).
        magnitude: lengths of the rows of the result (DoRA).
        base_layer: the weight that the update is added to, where the file has it.
    """

    first: np.ndarray
    second: np.ndarray
    scale: float
    values: np.ndarray | None = None
    magnitude: np.ndarray | None = None
    base_layer: TensorSource | None = None
    is_embedding: bool = False


def read_peft(directory: Path, model: ModelConfig, base: Weights | None = None) -> Adapter:
    """Return the adapter in ``directory`` for a ``model`` without one.

    ``base``: weights of the model, which adapters that change the base, and those of some layers or of the head, require.

    Raises:
        UserError: a file is missing or damaged, a key changes the model in a way that is not computed, or a tensor does not
            match the model.
    """
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(f"{directory}: {WEIGHTS_FILE} is missing; adapters in pickled files are not read")
    reader = PeftReader(directory / CONFIG_FILE, path, model, base)
    pet, weights = reader.read()
    return Adapter(directory, pet, weights, recorded_base(reader.content, reader.metadata))


def check_keys(path: Path, content: Mapping[str, Any]) -> None:
    """Raise UserError for the first key of ``adapter_config.json`` that may change the model in a way that is not computed."""
    kind = content.get("peft_type")
    if kind not in PEFT_TYPES:
        raise UserError(
            f"{path}: peft_type: unsupported (value {shortened(kind)}); supported: {', '.join(PEFT_TYPES)}, BOTTLENECK; "
            f"{MERGE_WITH_PEFT}"
        )
    for key, value in content.items():
        allowed = ALLOWED.get(key, ())
        if allowed is None or value in EMPTY or any(value is item or value == item for item in allowed):
            continue
        if key == "init_lora_weights":
            raise UserError(f"{path}: {key}: {_initialization(value)}")
        supported = f"supported: {', '.join(map(str, allowed))}" if allowed else "leave it out if it changes nothing"
        raise UserError(f"{path}: {key}: unsupported (value {shortened(value)}); {supported}, or {MERGE_WITH_PEFT}")
    for key in ("alpha_pattern", "init_lora_weights"):
        if kind == PEFT_ADALORA and content.get(key) not in (*EMPTY, True):
            raise UserError(f"{path}: {key}: unsupported with peft_type {kind} (value {shortened(content[key])})")


def _initialization(value: Any) -> str:
    """Return why an adapter with this ``init_lora_weights`` is not read, and what to do."""
    text = str(value)
    if text.startswith("pissa_niter_") or text == "corda":
        return f"changes the base by an update that its weights do not determine (value {text}); {CONVERT_WITH_PEFT}"
    if text in ("loftq", "lora_ga"):
        return f"changes the base, which the adapter does not contain (value {text}); {MERGE_WITH_PEFT}"
    return f"unsupported (value {shortened(value)}); {MERGE_WITH_PEFT}"


class PeftReader:
    """The conversion of one adapter: from the tensors of its file to weights and the section that describes them."""

    def __init__(self, config_path: Path, path: Path, model: ModelConfig, base: Weights | None) -> None:
        self.config_path, self.path, self.model, self.base = config_path, path, model, base
        self.content = read_json(config_path)
        check_keys(config_path, self.content)
        self.metadata = read_metadata(path)
        self.family = FamilyWeights(model)
        self.adaptive = self.content["peft_type"] == PEFT_ADALORA

    def read(self) -> tuple[PetConfig, dict[str, TensorSource]]:
        """Return the section ``pet_config`` and the weights by mindllm's names."""
        updates, replaced = self._updates()
        self._check_names(updates, replaced)
        # Updates outside layers, of the embedding and the head, become whole weights.
        for module in [module for module in updates if not NUMBER.search(module)]:
            replaced[f"{module}{WEIGHT}"] = self._full_weight(module, updates.pop(module))
        if self.model.tie_word_embeddings:
            self._drop_tied_head(replaced)
        keys, updates = self._unify_ranks(updates)
        weights: dict[str, TensorSource] = {}
        for name, source in replaced.items():
            weights |= self.family.read_tensor(self.family.weights[name], source)
        for name, update in self._fill_layers(updates).items():
            weights |= dict(self._adapter_weights(self.family.weights[f"{name}{WEIGHT}"], update))
        pet = self._section(keys, weights)
        self._fill_modules(pet, weights)
        return pet, weights

    def _updates(self) -> tuple[dict[str, Update], dict[str, TensorSource]]:
        """Return the updates by module, and the tensors that replace whole weights."""
        parts: dict[str, dict[str, TensorSource]] = {}
        replaced: dict[str, TensorSource] = {}
        embeddings = set()
        for name, tensor in read_tensor_file(self.path).items():
            name = name.removeprefix(PREFIX)
            ending = next((ending for ending in TENSOR_KINDS if name.endswith(f".{ending}")), "")
            if not ending:
                replaced[name] = tensor
                continue
            module = name.removesuffix(f".{ending}")
            parts.setdefault(module, {})[TENSOR_KINDS[ending]] = tensor
            embeddings |= {module} if "embedding" in ending else set()
        if self.adaptive:
            parts = {name: self._restore_ranks(name, tensors) for name, tensors in parts.items()}
        return {name: self._update(name, tensors, name in embeddings) for name, tensors in parts.items()}, replaced

    def _restore_ranks(self, module: str, tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
        """Restore the ranks that AdaLoRA removed, as zeros."""
        pattern = {
            name.removeprefix(PREFIX).rpartition(".")[0]: mask
            for name, mask in (self.content.get("rank_pattern") or {}).items()
        }
        restored = dict(tensors)
        for kind in ("first", "second", "values"):
            if kind not in tensors or module not in pattern:
                continue
            values, mask = np.asarray(tensors[kind], np.float32), np.array(pattern[module], bool)
            by_rank = values.T if kind == "second" else values
            if mask.sum() == len(by_rank) < len(mask):
                filled = np.zeros((len(mask), *by_rank.shape[1:]), np.float32)
                filled[mask] = by_rank
                restored[kind] = np.ascontiguousarray(filled.T if kind == "second" else filled)
        return restored

    def _update(self, module: str, tensors: Mapping[str, TensorSource], is_embedding: bool) -> Update:
        if missing := [kind for kind in ("first", "second") if kind not in tensors]:
            name = {"first": "lora_A", "second": "lora_B"}[missing[0]]
            raise UserError(f"{self.path}: {PREFIX}{module}.{name} is missing; save the adapter again")
        first, second = (np.asarray(tensors[kind], np.float32) for kind in ("first", "second"))
        rank, scale = self._rank_and_scale(module)
        if first.shape[0] != rank:
            key = "init_r" if self.adaptive else "r"
            raise UserError(
                f"{self.path}: {PREFIX}{module}.lora_A has rank {first.shape[0]}, but {self.config_path.name} gives {rank} "
                f"({key}, rank_pattern); correct {key}"
            )
        magnitude, values = (
            None if tensors.get(kind) is None else np.asarray(tensors[kind], np.float32).reshape(-1)
            for kind in ("magnitude", "values")
        )
        return Update(first, second, scale, values, magnitude, tensors.get("base_layer"), is_embedding)

    def _rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank and the factor of a module, from ``r``, ``lora_alpha`` and their patterns."""
        try:
            if self.adaptive:
                return int(self.content["init_r"]), 1.0
            rank = int(_by_pattern(self.content.get("rank_pattern"), module, self.content["r"]))
            alpha = float(_by_pattern(self.content.get("alpha_pattern"), module, self.content["lora_alpha"]))
            return rank, alpha / (math.sqrt(rank) if self.content.get("use_rslora") else rank)
        except (KeyError, TypeError, ValueError, ZeroDivisionError, re.error) as error:
            raise UserError(f"{self.config_path}: cannot be read: {shortened(repr(error))}") from None

    def _check_names(self, updates: Mapping[str, Update], replaced: Mapping[str, TensorSource]) -> None:
        """Raise UserError for the first tensor that the model does not have, or has in another shape."""
        shapes = self.family.shapes()
        head = self.family.table.theirs(HEAD)
        if self.model.tie_word_embeddings:
            shapes[head] = shapes[self.family.table.theirs(EMBEDDING)]
        for module, update in updates.items():
            name = f"{module}{WEIGHT}"
            key = f"{PREFIX}{module}.{'lora_embedding_A' if update.is_embedding else 'lora_A'}"
            self._check_name(key, name, shapes)
            weight, shape = self.family.weights.get(name), shapes[name]
            rows, columns = shape[::-1] if (weight and weight.transposed) or update.is_embedding else shape
            rank = len(update.first)
            for kind, value, expected in (
                ("first", update.first, (rank, columns)),
                ("second", update.second, (rows, rank)),
                ("magnitude", update.magnitude, (rows,)),
            ):
                if value is not None and value.shape != expected:
                    raise self._mismatch(f"{PREFIX}{module} ({kind} matrix)", value.shape, expected)
        for name, tensor in replaced.items():
            self._check_name(f"{PREFIX}{name}", name, shapes)
            if tuple(tensor.shape) != shapes[name]:
                raise self._mismatch(f"{PREFIX}{name}", tuple(tensor.shape), shapes[name])

    def _check_name(self, key: str, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if name not in shapes:
            raise UserError(f"{self.path}: adapter does not match this model: unexpected key {key}; pass its own base")
        if name in self.family.weights and self.family.weights[name].expert is not None:
            raise UserError(f"{self.path}: {key}: adapters of experts are unsupported; {MERGE_WITH_PEFT}")

    def _mismatch(self, key: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> UserError:
        return UserError(
            f"{self.path}: adapter does not match this model: {key} has shape {list(shape)}, expected {list(expected)}; pass "
            "its own base"
        )

    def _full_weight(self, module: str, update: Update) -> TensorSource:
        """Return the weight of the embedding or the head with its update."""
        if update.magnitude is not None:
            raise UserError(f"{self.path}: use_dora: unsupported for {module}; {MERGE_WITH_PEFT}")
        name = f"{module}{WEIGHT}"
        if update.base_layer is None and not update.is_embedding:
            update = self._without_initial(module, update)
        tied = self.model.tie_word_embeddings and name == self.family.table.theirs(HEAD)
        weight_name = EMBEDDING if tied else self.family.weights[name].ours[0]
        base = self._base(module)[weight_name] if update.base_layer is None else update.base_layer

        def make() -> np.ndarray:
            product = np.float32(update.scale) * (update.second @ update.first)
            return np.asarray(base, np.float32) + (product.T if update.is_embedding else product)

        return LazyTensor(tuple(base.shape), np.dtype(np.float32), make)

    def _drop_tied_head(self, replaced: dict[str, TensorSource]) -> None:
        """Remove a head that equals the embedding.

        Raises:
            UserError: PEFT would give the head other weights than the embedding, which the model has only once.
        """
        head, embedding = self.family.table.theirs(HEAD), self.family.table.theirs(EMBEDDING)
        changed = [name for name in (head, embedding) if name in replaced]
        ties = self.content.get("ensure_weight_tying") or FINGERPRINT in self.metadata
        if not changed or (changed == [embedding] and ties):
            return
        if len(changed) == 2 and np.allclose(
            np.asarray(replaced[head]), np.asarray(replaced[embedding]), rtol=0, atol=1e-6
        ):
            del replaced[head]
            return
        raise UserError(
            f"{self.path}: {changed[0]}: the adapter separates lm_head from the embedding, and config.json of the base ties "
            f"them (tie_word_embeddings: true); untie the base first, or {MERGE_WITH_PEFT}"
        )

    def _unify_ranks(self, updates: Mapping[str, Update]) -> tuple[dict[str, Any], dict[str, Update]]:
        """Return keys of ``pet_config``, and the updates with the rank and the scale that these give to all modules."""
        if self.adaptive:
            return {}, dict(updates)
        updates = {name: self._without_initial(name, update) for name, update in updates.items()}
        rank, alpha = self.content["r"], float(self.content["lora_alpha"])
        square_root = bool(self.content.get("use_rslora"))
        shared = alpha / (math.sqrt(rank) if square_root else rank)
        widest = max((len(update.first) for update in updates.values()), default=rank)
        if widest != rank:
            alpha = shared * (math.sqrt(widest) if square_root else widest)
        keys = {"lora_rank": widest, "lora_alpha": alpha, "use_rslora": square_root}
        return keys, {name: _resized(update, widest, shared) for name, update in updates.items()}

    def _without_initial(self, module: str, update: Update) -> Update:
        """Add ranks that subtract from the base what ``init_lora_weights`` subtracts when PEFT creates the adapter."""
        method = self.content.get("init_lora_weights")
        if method not in CHANGES_BASE:
            return update
        if self.model.base.quantization_config is not None:
            raise UserError(
                f"{self.config_path}: init_lora_weights: changes the base, which is quantized (value {method}); "
                f"{CONVERT_WITH_PEFT}"
            )
        weight = self.family.weights[f"{module}{WEIGHT}"]
        if method == "olora" and weight.transposed:
            raise UserError(
                f"{self.config_path}: init_lora_weights: {method} is undefined for {module}, whose matrix is transposed; "
                f"{CONVERT_WITH_PEFT}"
            )
        matrix = self._matrix(module, weight)
        first, second = subtract_initial(method, matrix, len(update.first), update.scale, f"{self.path}: {module}")
        return replace(
            update, first=np.concatenate([update.first, first]), second=np.concatenate([update.second, second], axis=1)
        )

    def _fill_layers(self, updates: dict[str, Update]) -> dict[str, Update]:
        """Return ``updates`` with one of zeros for each module that is adapted in other layers only."""
        kinds: dict[str, Update] = {}
        for name, update in updates.items():
            kinds.setdefault(NUMBER.sub("{}", name, count=1), update)
        filled = {}
        for name, weight in self.family.weights.items():
            module = name.removesuffix(WEIGHT)
            pattern = kinds.get(NUMBER.sub("{}", module, count=1))
            if pattern is None or not name.endswith(WEIGHT):
                continue
            filled[module] = updates.get(module) or self._zeros(module, weight, pattern)
        return filled

    def _zeros(self, module: str, weight: Weight, pattern: Update) -> Update:
        shape = self.family.shapes()[f"{module}{WEIGHT}"]
        rows, columns = shape[::-1] if weight.transposed else shape
        rank = len(pattern.first)
        return Update(
            np.zeros((rank, columns), np.float32),
            np.zeros((rows, rank), np.float32),
            pattern.scale,
            None if pattern.values is None else np.zeros(rank, np.float32),
            None if pattern.magnitude is None else row_lengths(self._matrix(module, weight)),
        )

    def _matrix(self, module: str, weight: Weight) -> np.ndarray:
        """Return the weight of the base that a module's update is added to, ``[out, in]`` in fp32."""
        values = np.asarray(self.family.write_tensor(weight, self._base(module)), np.float32)
        return values.T if weight.transposed else values

    def _base(self, module: str) -> Weights:
        if self.base is None:
            raise UserError(
                f"{self.path}: the update of {module} depends on the base, which cannot be restored from merged weights; keep "
                "the base"
            )
        return self.base

    def _adapter_weights(self, weight: Weight, update: Update) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the weights of the adapters for one matrix in files. The first adapter has the shared ones."""
        modules = [name.removesuffix(WEIGHT) for name in weight.ours]
        yield f"{modules[0]}.{A}", update.first
        if update.values is not None:
            yield f"{modules[0]}.{VALUES}", update.values
        for kind, values in ((B, update.second), (MAGNITUDE, update.magnitude)):
            if values is not None:
                parts = self.family.split(weight, values)
                yield from ((f"{name}.{kind}", part) for name, part in zip(modules, parts, strict=True))

    def _section(self, keys: dict[str, Any], weights: Mapping[str, TensorSource]) -> PetConfig:
        """Return the section ``pet_config`` that describes ``weights``."""
        modules = dict.fromkeys(".".join(name.split(".")[3:-1]) for name in weights if name.endswith(f".{B}"))
        saved = dict.fromkeys(name.rpartition(".")[0].split(".")[-1] for name in weights if not is_adapter_weight(name))
        if not modules:
            raise UserError(f"{self.path}: no projection in a layer has an adapter; {MERGE_WITH_PEFT}")
        try:
            if self.adaptive:
                keys = {key: self.content[peft_key] for key, peft_key in ADALORA_KEYS.items()}
                keys |= {"pet_type": "adalora", "lora_alpha": float(self.content["lora_alpha"])}
            else:
                keys |= {"use_dora": bool(self.content.get("use_dora"))}
            return PetConfig(
                lora_dropout=float(self.content.get("lora_dropout") or 0.0),
                target_modules=tuple(modules),
                modules_to_save=tuple(saved),
                **keys,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.config_path}: cannot be read: {shortened(str(error))}") from None

    def _fill_modules(self, pet: PetConfig, weights: dict[str, TensorSource]) -> None:
        """Add the weights of the base for modules that are trained whole in other layers only."""
        tuned = self.model.base.model_copy(update={"pet_config": pet})
        for name in tuned.architecture.trained_shapes():
            if name not in weights and not is_adapter_weight(name) and self.base is not None:
                weights[name] = self.base[name]


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value whose key matches the end of ``module``, as PEFT looks it up."""
    matching = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matching, default)


def _resized(update: Update, rank: int, scale: float) -> Update:
    """Return an equal update of another ``rank``, which is at least its own, and another ``scale``."""
    more = rank - len(update.first)
    second = update.second if update.scale == scale else update.second * np.float32(update.scale / scale)
    return replace(
        update,
        first=np.pad(update.first, ((0, more), (0, 0))),
        second=np.ascontiguousarray(np.pad(second, ((0, 0), (0, more)))),
        scale=scale,
    )


def subtract_initial(
    method: str, weight: np.ndarray, rank: int, scale: float, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return matrices ``[rank, in]`` and ``[out, rank]`` with the initial update that PEFT subtracts from the base.

    The sign is in the second one: PEFT trains with the base ``weight + scale * second @ first``.

    Raises:
        UserError: the weights do not determine the update; names ``name``.
    """
    matrix = weight.astype(np.float64)
    if method == "olora":
        orthogonal, triangle = np.linalg.qr(matrix[:, :rank])
        lengths = np.abs(np.diag(triangle))
        if lengths.min() < SMALLEST_GAP * lengths.max():
            raise UserError(f"{name}: init_lora_weights: columns of the base are linearly dependent, {UNDETERMINED}")
        return (orthogonal.T @ matrix).astype(np.float32), -orthogonal.astype(np.float32)
    left, values, right = _largest_singular(matrix, rank)
    if len(values) > rank and values[rank - 1] - values[rank] < SMALLEST_GAP * values[0]:
        raise UserError(
            f"{name}: init_lora_weights: singular values {rank} and {rank + 1} of the base are equal, {UNDETERMINED}"
        )
    roots = np.sqrt(values[:rank] / scale)
    first, second = roots[:, None] * right[:rank], left[:, :rank] * roots
    return first.astype(np.float32), -second.astype(np.float32)


def _largest_singular(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return at least ``rank + 1`` singular vectors and values if they exist, the largest first."""
    smaller = min(matrix.shape)
    if smaller <= SMALL or rank + 1 > smaller // 8:
        return np.linalg.svd(matrix, full_matrices=False)
    from scipy.sparse.linalg import svds

    left, values, right = svds(matrix, k=rank + 1, v0=np.ones(smaller), return_singular_vectors=True)
    return left[:, ::-1], values[::-1], right[::-1]
