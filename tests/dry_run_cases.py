"""Simulations made of a formula, so that what the dry run does with them is tested without running any."""

from __future__ import annotations

from collections.abc import Sequence

from small_cluster import cluster_run

from mindllm.compiled.simulation.simulation import ACTIVATIONS, COMMUNICATION, GRADIENTS, OPTIMIZER, OTHER, WEIGHTS
from mindllm.config import RunConfig
from mindllm.dry_run.moments import Use
from mindllm.dry_run.profile import Alive, Profile
from mindllm.dry_run.simulations import Request
from mindllm.parallel.stages import LAST, Run, stages_of
from mindllm.units import MIB

WEIGHT = Use(WEIGHTS, "model.layers.*.feed_forward.w1.weight", "", False)
MOMENT = Use(OPTIMIZER, "adam_m.model.layers.*.feed_forward.w1.weight", "", False)
GRADIENT = Use(GRADIENTS, "model.layers.*.feed_forward.w1", "MatMul", True)
KEPT = Use(ACTIVATIONS, "model.layers.*.feed_forward.w1", "MatMul", False)
RECEIVED = Use(COMMUNICATION, "model", "Receive", False)
STEP = "Default/update-ApplyGradients/Mul"
CONSTANTS = Use(OTHER, "data", "", False)
BACKWARD = "Gradients/Default/layers-CellList/*-DecoderLayer/FlashAttentionScoreGrad"
OF_A_LAYER = {"full": 10, "select": 30, "none": 50}  # MB kept by one micro-batch
WORKING = {"full": 45, "select": 22, "none": 5}  # MB that the backward pass of a layer needs beside that
COMMUNICATED = 15  # MB more of a recomputed layer whose tensor-parallel communication is not repeated
WINDOWED = 0.8  # is what a layer keeps that has a window, and others have none
TABLES = 12  # MB that layers of another type read
AHEAD = {
    **{"model_type": "deepseek_v3", "num_layers": 5, "n_kv_heads": 4, "rms_norm_eps": 1e-6, "kv_lora_rank": 16},
    **{"q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "expert_num": 4},
    **{"num_experts_chosen": 2, "moe_shared_expert_intermediate_size": 32, "moe_intermediate_size": 32},
    **{
        "use_gating_sigmoid": True,
        "balance_via_topk_bias": True,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 1,
    },
}  # keys of a model with a layer that predicts ahead
LOSS = 60  # MB that the loss needs before, of one slice


def profile(config: RunConfig, rank: int) -> Profile:
    """A stage whose layers take 100 MB each, and whose activations depend on recomputation.

    A backward pass starts at the last layer: layers recomputed less, which have freed what they kept when others are reached.
    """
    stage = next(stage for stage in stages_of(config) if stage.rank == rank)
    kept = stage.alive * sum(_of_a_layer(config, run) * run.count for run in stage.runs)
    if config.parallel_config.model_parallel > 1 and not config.recompute_config.mp_comm_recompute:
        kept += COMMUNICATED * stage.alive * sum(run.count for run in stage.runs if run.kind.recompute)
    kept += (
        LOSS / config.model.config.loss_chunks if stage.place == LAST else WORKING[stage.runs[-1].kind.recomputation]
    )
    kept += TABLES * (len({run.kind.spec for run in stage.runs}) - 1)
    always = {WEIGHT: 30 * stage.layers, MOMENT: 60 * stage.layers, GRADIENT: 10 * stage.layers}
    moments = {
        STEP: {**always, GRADIENT: 20 * stage.layers},
        BACKWARD: {**always, KEPT: kept + 7, RECEIVED: 3},
    }
    in_bytes = {kind: {use: round(size * MIB) for use, size in fill.items()} for kind, fill in moments.items()}
    in_bytes[BACKWARD][CONSTANTS] = 1024 * config.parallel_config.micro_batch_num
    peak = max(sum(fill.values()) for fill in in_bytes.values())
    blocks = tuple(
        Alive(f"Default/layers-CellList/{n}-DecoderLayer/MatMul-op{n}", KEPT, MIB, n, None) for n in range(3)
    )
    return Profile(rank, peak, peak + MIB, in_bytes, ((0, 0), (5, peak), (9, 100)), 5, blocks, ("a line of MindSpore",))


def _of_a_layer(config: RunConfig, run: Run) -> float:
    """MB that a layer of a run keeps of a micro-batch."""
    spec = run.kind.spec or config.model.config.architecture.layers[0]
    return OF_A_LAYER[run.kind.recomputation] * (1 if spec.attention.window is None else WINDOWED)


class FormulaSimulations:
    """Stands in for the processes; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def prepare_source_lines(self, config: RunConfig) -> None:
        """Nothing takes time here."""

    def profiles(self, requests: Sequence[Request]) -> list[Profile]:
        self.asked += requests
        return [profile(request.config, request.rank) for request in requests]


def pipeline(stages: int = 4, layers: int = 32, micro: int = 16, **sections) -> RunConfig:
    return cluster_run(pp=stages, micro=micro, model={"num_layers": layers, **sections.pop("model", {})}, **sections)
