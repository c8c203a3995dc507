"""Published training steps as workloads: tables of MindFormers on Atlas, of Korthikanti et al. (2022), of vTrain (2024)."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindllm.architecture.decoder import Architecture
from mindllm.architecture.layer_counts import layer_counts
from mindllm.architecture.parts import FeedForwardSpec
from mindllm.config import RecomputeConfig
from mindllm.config.model import ModelConfig
from mindllm.errors import UserError
from mindllm.parallel.layer_plan import LayerPlan, read_plan
from mindllm.timing.costs.work import size_of
from mindllm.timing.measured.calibrate import Measured
from mindllm.timing.workload import Numerics, Strategy, UpdateRule, Workload

MEGATRON = Numerics("float16", gradient_bytes=2, fused_attention=False, dropout="fused", scaled_loss=True)
SELECTIVE = (
    r"attention\.(scores|softmax|dropout|context)",
)  # of Korthikanti et al.: what attention computes per pair of tokens
VOCABULARY, SEQUENCE = 51200, 2048
ROUTING: Mapping[str, Mapping[str, Any]] = {
    "mixtral-8x7b": {"expert_num": 8, "num_experts_chosen": 2, "capacity_factor": 1.1},
}
"""What the tables do not say of mixtures of experts: from MindFormers' own ``finetune_mixtral-8x7b.yaml`` (r1.2.0)."""
Row = Mapping[str, str]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV.

    Raises:
        UserError: the file cannot be read or has no rows.
    """
    try:
        rows: list[Row] = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if not rows:
        raise UserError(f"{path}: has no rows")
    return rows


def gpt(hidden: int, heads: int, layers: int, vocabulary: int, sequence: int) -> Architecture:
    """A GPT-3: learned positions, LayerNorm, dropout, four times as wide between, the head is the embedding."""
    learned = {"position_embedding_type": "learned_absolute", "max_position_embedding": sequence}
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_heads": heads, "num_layers": layers, "vocab_size": vocabulary}
    sizes |= {"tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    found = ModelConfig.model_validate({**sizes, **learned, "seq_length": sequence}).architecture
    feed_forward = FeedForwardSpec(hidden, 4 * hidden, "gelu_tanh", gated=False, bias=True)
    return replace(found, layers=tuple(replace(layer, feed_forward=feed_forward) for layer in found.layers))


def even_plan(layers: int, stages: int, chunks: int, full: bool, selected: tuple[str, ...] = ()) -> LayerPlan:
    """Equal stages; the layers that are left over are on the first ones."""
    left = layers % (stages * chunks)
    rows = [[int(chunk * stages + stage < left) for stage in range(stages)] for chunk in range(chunks)]
    recompute = RecomputeConfig.model_validate({"recompute": full, "select_recompute": list(selected) or False})
    offset = tuple(map(tuple, rows)) if chunks > 1 else tuple(rows[0])
    return read_plan(layer_counts(layers, stages, chunks, offset), recompute, lambda key, said: UserError(key + said))


def korthikanti(row: Row) -> Iterator[Measured]:
    """Fully recomputed, and selectively with sequence parallelism; what was not measured is left out.

    The products of weights are taken to add their gradients up themselves: the authors' code came with that fusion.
    """
    hidden, heads, layers, tp, pp = (int(row[key]) for key in ("hidden", "heads", "layers", "tp", "pp"))
    micro, replicas = int(row["mbs"]), int(row["gpus"]) // tp // pp
    for name, key, full in (("full", "full_recompute_s", True), ("selective", "sp_selective_s", False)):
        if not row[key]:
            continue
        strategy = Strategy(
            replicas, tp, pp, int(row["gbs"]) // replicas // micro, 1, micro, sequence_parallel=not full
        )
        plan = even_plan(layers, pp, int(row["interleave"]), full, () if full else SELECTIVE)
        workload = Workload(gpt(hidden, heads, layers, VOCABULARY, SEQUENCE), SEQUENCE, strategy, plan, MEGATRON)
        yield Measured(f"{row['model']}, {name}", workload, float(row[key]))


def vtrain(row: Row) -> Measured:
    """Everything is recomputed: nothing else fits the memory of these rows.

    Gradients are taken to be added up in half precision, Megatron-LM's default of float16, by kernels of their own.
    """
    keys = ("hidden size", "attention heads", "# layers", "sequence length")
    hidden, heads, layers, sequence = (int(row[key]) for key in keys)
    tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
    micro, batch = int(row["micro batch"]), int(row["global batch"])
    strategy = Strategy(dp, tp, pp, batch // dp // micro, 1, micro)
    architecture = gpt(hidden, heads, layers, VOCABULARY, sequence)
    numerics = replace(MEGATRON, adds_gradients=True)
    workload = Workload(architecture, sequence, strategy, even_plan(layers, pp, 1, full=True), numerics)
    name = f"{row['Parameters (billion)']}B, dp{dp} tp{tp} pp{pp}, micro-batch {micro}"
    return Measured(name, workload, float(row["iteration time (ms)"]) / 1e3)


def atlas(row: Row) -> Measured | None:
    """A row of MindFormers' tables; None for a mixture of experts whose routing is not known.

    ``micro_batch_interleave`` copies share a micro-batch that is as many times larger. Where no column
    ``use_attn_mask_compression`` says otherwise, the kernel of attention is given a mask of every pair of tokens: MindFormers'
    default (``llama_config.py``, r1.3.0), and none of the YAMLs of these rows has the key.
    """
    groups = int(row["ep"] or 1)
    if groups > 1 and row["model"] not in ROUTING:
        return None
    pp, sequence = int(row["pp"]), int(row["seq_length"])
    given = {"intermediate_size": row["ffn"], "n_kv_heads": row["n_kv_heads"]}
    keys = ("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_length")
    fields: dict[str, Any] = {key: int(row[key]) for key in keys} | {key: int(at) for key, at in given.items() if at}
    fields |= ROUTING[row["model"]] if groups > 1 else {}
    chunks = int(row["pp_interleave_num"] or 1)
    counts = layer_counts(fields["num_layers"], pp, chunks, _offset(row["offset"]))
    plan = read_plan(
        counts, _recomputation(row["recompute"]), lambda key, said: UserError(f"{row['model']}: {key} {said}")
    )
    strategy = Strategy(
        int(row["dp"]),
        int(row["mp"]),
        pp,
        micro_batches=int(row["micro_batch_num"]) if pp > 1 else 1,
        accumulation=int(row["gradient_accumulation"] or 1),
        micro_batch_size=int(row["batch_size"]) * int(row["micro_batch_interleave"] or 1),
        sequence_parallel=row["use_seq_parallel"] == "True" and int(row["mp"]) > 1,
        optimizer_shard=row["optimizer_parallel"] == "True",
        vocabulary_parallel=False,
        expert_parallel=groups,
        copies=int(row["micro_batch_interleave"] or 1),
    )
    flash, compressed = (row.get(key) == "True" for key in ("flash_attention", "use_attn_mask_compression"))
    weight_bytes = size_of(row["param_init_type"])
    numerics = Numerics(row["compute_dtype"], weight_bytes, flash, reads_masks=flash and not compressed)
    # MindFormers has no copies in single precision of weights in half precision. Its graphs are compiled with fusion.
    casts = row["param_init_type"] == "float32" or row["param_init_type"] != row["compute_dtype"]
    update = UpdateRule(weight_bytes=weight_bytes, casts_weights=casts, fuses_casts=True)
    architecture = ModelConfig.model_validate(fields).architecture
    workload = Workload(architecture, sequence, strategy, plan, numerics, update=update)
    return Measured(
        row["model"], workload, workload.tokens / strategy.device_num / float(row["tokens_per_s_per_device"])
    )


def read_atlas(row: Row) -> Measured | str:
    """A row of MindFormers' tables, or why it is not predicted."""
    try:
        return atlas(row) or "mixture of experts of unknown routing"
    except (UserError, ValueError) as error:
        return str(error).splitlines()[0]


def _offset(text: str) -> Any:
    value = ast.literal_eval(text or "0")
    if not isinstance(value, list):
        return value
    return tuple(tuple(part) if isinstance(part, list) else part for part in value)


def _recomputation(text: str) -> RecomputeConfig:
    """From ``full=… sel=… comm=…``; what is not said is not recomputed."""
    said = dict(re.findall(r"(\w+)=(.+?)(?=\s+\w+=|\s*$)", text))
    names = {"full": "recompute", "sel": "select_recompute", "comm": "select_comm_recompute"}
    values = {names[key]: ast.literal_eval(value) or False for key, value in said.items() if key in names}
    return RecomputeConfig.model_validate(values)
