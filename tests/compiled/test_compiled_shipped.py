"""The shipped configurations of Llama 2 compile: with few layers in every run, whole and every stage in the slow one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mindllm.compiled.rank.compile_rank import compile_rank
from mindllm.config import load_config
from mindllm.parallel.context import mesh_of
from mindllm.parallel.layer_plan import make_plan

ALWAYS = ("pretrain_llama2_7b_8p", "pretrain_llama2_70b_64p")
LLAMA2 = sorted((Path(__file__).parents[2] / "configs" / "llama2").glob("pretrain_*p.yaml"))
LAYERS_PER_STAGE = 1


def scaled_down(path):
    """The configuration with one layer a stage, and as few micro-batches as keep its schedule."""
    whole = load_config(path)
    stages = whole.parallel_config.pipeline_stage
    counts = {}
    for key in ("recompute", "select_recompute", "select_comm_recompute"):
        value = getattr(whole.recompute_config, key)
        if isinstance(value, list | tuple):
            counts[f"recompute_config.{key}"] = [min(count, LAYERS_PER_STAGE) for count in value]
    sizes = {
        "model.model_config.num_layers": LAYERS_PER_STAGE * stages,
        "model.model_config.offset": 0,
        "parallel_config.micro_batch_num": stages,
    }
    return load_config(path, {**sizes, **counts})


def layers_of(graph):
    return {int(name.split(".")[2]) for name in graph.parameters if name.startswith("model.layers.")}


@pytest.fixture(scope="module")
def last_stages(request):
    with ThreadPoolExecutor(max_workers=2) as pool:
        configs = {item.callspec.params["path"].stem: item for item in request.session.items if is_of_few_layers(item)}
        configs = {name: scaled_down(item.callspec.params["path"]) for name, item in configs.items()}
        ranks = {name: mesh_of(config).device_num - 1 for name, config in configs.items()}
        yield {name: pool.submit(compile_rank, config, ranks[name]) for name, config in configs.items()}


def is_of_few_layers(item):
    """Whether an item of the session is a case of the test below: only what is asked for is compiled."""
    return item.originalname == "test_a_shipped_configuration_compiles_with_few_layers"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if path.stem in ALWAYS else pytest.mark.slow, id=path.stem) for path in LLAMA2],
)
def test_a_shipped_configuration_compiles_with_few_layers(path, last_stages):
    config, graph = scaled_down(path), last_stages[path.stem].result()
    sizes, model = config.parallel_config, config.model.config
    assert layers_of(graph) == set(range(model.num_layers - LAYERS_PER_STAGE, model.num_layers))
    number = model.num_layers - 1
    weight = graph.parameters[f"model.layers.{number}.feed_forward.w1.weight"]
    assert weight.layout.slice_shape == (model.intermediate_size // sizes.model_parallel, model.hidden_size)
    assert weight.shape[0] * sizes.data_parallel * sizes.model_parallel == model.intermediate_size
    used = {node.op for node in graph.collectives()}
    assert {"AllGather", "ReduceScatter"} <= used  # the optimizer's
    assert ({"Send", "Receive"} <= used) == (sizes.pipeline_stage > 1)
    recomputed = {node.path.partition(".layers.")[2].split(".")[0] for node in graph.nodes() if node.recomputed}
    assert recomputed == {
        str(n) for n, layer in enumerate(make_plan(config).layers) if asks_for_recompute(layer, graph, n)
    }


def asks_for_recompute(layer, graph, number):
    return number in layers_of(graph) and (layer.recompute or bool(layer.patterns))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 80 layers on 8 stages take 13 minutes beside other work
@pytest.mark.parametrize("path", LLAMA2, ids=lambda path: path.stem)
def test_every_stage_of_a_shipped_configuration_compiles(path):
    stages = load_config(path).parallel_config.pipeline_stage
    config = load_config(path, {"parallel_config.micro_batch_num": stages})  # more repeat the same calls
    mesh = mesh_of(config)
    heads = [stage * mesh.device_num // mesh.pipeline_stage for stage in range(mesh.pipeline_stage)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        graphs = list(pool.map(partial(compile_rank, config), heads))
    held = [layers_of(graph) for graph in graphs]
    assert sorted(number for layers in held for number in layers) == list(range(config.model.config.num_layers))
