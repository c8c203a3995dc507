"""A check fits into memory: smaller meshes stay of a kind, with every kind of stage, and the verdict says what is left out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from small_cluster import cluster_run

from mindllm.config import RunConfig
from mindllm.errors import UserError
from mindllm.jobs import memory as host_memory
from mindllm.jobs.memory import MemoryClaim
from mindllm.parallel.layer_plan import make_plan
from mindllm.reduced_runs.layers import kept_layers, kept_plan
from mindllm.reduced_runs.mesh import ReducedMesh, kept_stages, reduced_meshes, stage_kinds
from mindllm.reduced_runs.model import reduce_model
from mindllm.terminal.console import PlainConsole
from mindllm.units import GIB
from mindllm.verify.outcome import MOST_RANKS, Outcome
from mindllm.verify.report import as_json, outcome_parts, write_table
from mindllm.verify.scope import fitting, needs_of, scope_of

EXPERTS = {
    **{"model_type": "mixtral", "expert_num": 16, "num_experts_chosen": 2, "num_layers": 32},
    **{"num_heads": 16, "n_kv_heads": 8, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512},
}
LARGE = cluster_run(
    dp=16,
    tp=4,
    pp=8,
    micro=32,
    expert_parallel=8,
    model=EXPERTS,
    parallel={"enable_parallel_optimizer": True},
    recompute_config={"recompute": [4, 4, 4, 4, 4, 4, 2, 0]},
)
"""512 devices; the stages are of four kinds: the first, five alike, one half recomputed, the last."""


def all_meshes(config: RunConfig) -> list[ReducedMesh]:
    return list(reduced_meshes(config))


@pytest.fixture
def free(monkeypatch, tmp_path):
    """Sets the memory that is free."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(host_memory, "_claims", [])
    return lambda count: monkeypatch.setattr(host_memory, "available_bytes", lambda: count)


def fitted(config: RunConfig, most_ranks: int = 1 << 20):
    with MemoryClaim() as claim:
        return fitting(config, False, claim, most_ranks, workers=2)


def test_smaller_meshes_are_shared_as_the_whole_one_is():
    found = all_meshes(LARGE)
    assert found[0].device_num == 512
    assert len({*found}) == len(found) > 20
    for mesh in found:
        assert min(mesh.data_parallel, mesh.model_parallel, mesh.expert_parallel, len(mesh.stages)) > 1
        replicas = mesh.data_parallel * mesh.model_parallel // (mesh.expert_parallel * mesh.model_parallel)
        assert replicas > 1
        assert mesh.expert_parallel < mesh.data_parallel
    assert min(mesh.device_num for mesh in found) == 4 * 2 * 4


def test_replicas_go_first():
    first, second, *_ = all_meshes(LARGE)
    assert (first.data_parallel, first.expert_parallel) == (16, 8)
    assert (second.model_parallel, len(second.stages), second.parts) == (4, 8, 2)


def test_every_kind_of_stage_and_of_layer_stays():
    kept = kept_layers(LARGE)
    plan, layers = kept_plan(LARGE, kept), LARGE.model.config.architecture.layers
    kinds = stage_kinds(plan, [layers[number] for number in kept])
    for mesh in all_meshes(LARGE):
        assert {kinds[stage] for stage in mesh.stages} == {*kinds}
        small = reduce_model(LARGE, mesh=mesh)
        assert small.parallel_config.device_num == mesh.device_num
        assert {layer.recompute for layer in make_plan(small).layers} == {True, False}
    smallest = reduce_model(LARGE, mesh=min(all_meshes(LARGE), key=lambda mesh: mesh.device_num))
    assert make_plan(smallest).counts == ((1, 1, 2, 1),)


def test_the_process_that_ranks_are_forked_from_counts_beside_them():
    needs = needs_of(reduce_model(LARGE))
    assert needs.total(2) - needs.single == max(3 * needs.worker, needs.ranks)
    assert replace(needs, ranks=0).total(1) == needs.single + 2 * needs.worker


def test_stages_alike_stand_for_each_other():
    assert kept_stages(["first", *"aaaa", "b", "last"], 4) == (0, 1, 5, 6)
    assert kept_stages(["first", *"aaaa", "b", "last"], 6) == (0, 1, 2, 3, 5, 6)


def test_where_memory_suffices_nothing_is_left_out(free):
    config = cluster_run(dp=2, tp=2, pp=2, micro=2)
    free(100 * GIB)
    model = fitted(config)
    assert model.config == reduce_model(config)
    assert model.workers == 2
    assert not scope_of(config, model.config).smaller_mesh


def test_the_largest_mesh_that_fits_is_checked(free):
    whole = needs_of(reduce_model(LARGE)).total(1)
    budgets = (whole, whole // 4, whole // 16)
    ranks = []
    for budget in budgets:
        free(int(budget / host_memory.SHARE) + 1)
        model = fitted(LARGE)
        assert model.needs.total(model.workers) <= budget
        ranks.append(model.config.parallel_config.device_num)
    assert ranks[0] == 512
    assert ranks == sorted({*ranks}, reverse=True)


def test_fewer_ranks_are_compiled_at_a_time_before_the_mesh_becomes_smaller(free):
    config = cluster_run(dp=2)
    needs = needs_of(reduce_model(config))
    free(int(needs.total(1) / host_memory.SHARE) + 1)
    model = fitted(config)
    assert (model.workers, model.config) == (1, reduce_model(config))


def test_what_does_not_fit_at_all_is_refused_with_what_it_takes(free):
    free(GIB)
    with pytest.raises(UserError, match=r"takes about \d\.\d GB, and there are 0\.6 GB, 60% of .*--memory-share"):
        fitted(LARGE)
    free(1000 * GIB)
    with pytest.raises(UserError, match="--most_ranks 8: the smallest mesh of this kind has 32; allow more"):
        fitted(LARGE, most_ranks=8)


def test_the_verdict_says_what_was_checked(tmp_path, capsys, free):
    free(1000 * GIB)
    small = fitted(LARGE, MOST_RANKS).config
    scope = scope_of(LARGE, small)
    outcome = Outcome(small, (), (), small.parallel_config.device_num, scope=scope)
    words = ["of 32 layers", "64 of 512 ranks (", "data_parallel 4 of 16", "of 32 micro-batches", "float32 for float16"]
    PlainConsole().print(*outcome_parts(outcome, "run.yaml"), sep="\n")
    verdict = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("all ranks match"))
    write_table([("run.yaml", outcome)], tmp_path / "table.md")
    for text in (verdict, (tmp_path / "table.md").read_text(), json.dumps(as_json(outcome))):
        assert all(word in text for word in words), text
    assert as_json(outcome)["checked"]["counts"]["ranks"] == (64, 512)
