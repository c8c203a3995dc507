"""Cells on pipeline stages: none that multiplies, normalises or looks up is left without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mindspore import nn
from small_cluster import cluster_run

from mindllm.models.causal_lm import CausalLM
from mindllm.models.decoder import Decoder
from mindllm.models.kernels import Kernels
from mindllm.parallel.layer_plan import make_plan
from mindllm.parallel.pipeline import place_on_stages

FORMS = {
    "llama": {},
    "a head of unit rows": {"model_type": "baichuan", "norm_head": True, "n_kv_heads": 4},
    "a tied head": {"tie_word_embeddings": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1},
}


def unplaced(cell: nn.Cell) -> Iterator[nn.Cell]:
    """Cells with operators that neither have a stage nor are in one that has; model and decoder only join others."""
    if hasattr(cell, "pipeline_stage"):
        return
    if cell._primitives and not isinstance(cell, CausalLM | Decoder):
        yield cell
    for child in cell.cells():
        yield from unplaced(child)


@pytest.mark.parametrize("form", FORMS)
def test_every_cell_with_operators_is_on_a_stage(form):
    run = cluster_run(pp=2, micro=2, model=FORMS[form])
    model = run.model.config
    kernels = Kernels.choose(model, "Ascend")
    lm = CausalLM(model, kernels)
    assert list(unplaced(lm))
    place_on_stages(lm, make_plan(run), model, kernels)
    assert not list(unplaced(lm))
