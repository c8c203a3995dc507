"""The registry of axes agrees with how ranks are numbered, and with what is a key of the schema."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mindllm.axes import AXES, KEYS, STAGE_AXES, MeshSizes
from mindllm.config import ParallelConfig
from mindllm.parallel.layout import Mesh
from mindllm.timing.workload import Strategy

SIZES = st.fixed_dictionaries({axis.key: st.integers(1, 4) for axis in AXES})


def test_every_size_of_the_mesh_is_a_key_and_is_held_under_its_name():
    for holder in (ParallelConfig(), Mesh(), Strategy()):
        assert isinstance(holder, MeshSizes)
        assert all(hasattr(holder, key) for key in KEYS)
    assert set(KEYS) <= set(ParallelConfig.model_fields)


@given(SIZES)
def test_ranks_along_an_axis_differ_in_it_alone(sizes):
    mesh = Mesh(**sizes)
    places = list(itertools.product(*(range(mesh.size(axis)) for axis in AXES)))  # by rank
    for number, axis in enumerate(AXES):
        for rank in range(0, mesh.device_num, max(1, mesh.device_num // 5)):
            along = [places[other] for other in mesh.ranks_along(axis.name, rank)]
            rest = {place[:number] + place[number + 1 :] for place in along}
            assert (len(rest), sorted(place[number] for place in along)) == (1, list(range(mesh.size(axis))))


@given(SIZES)
def test_products_are_those_of_the_axes(sizes):
    config = ParallelConfig(**sizes)
    assert config.device_num == config.stage_device_num * config.pipeline_stage
    assert config.replica_num * config.model_parallel == config.stage_device_num


def test_a_text_leaves_out_an_optional_axis_of_one():
    assert ParallelConfig(data_parallel=2).sizes_text(STAGE_AXES) == "data_parallel 2 x model_parallel 1"
    assert ParallelConfig(context_parallel=4).sizes_text(of="name") == "dp 1 x cp 4 x tp 1 x pp 1"
    assert ParallelConfig(context_parallel=4).sizes_text(of="size") == "1 x 4 x 1 x 1"
