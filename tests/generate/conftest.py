"""Everything here runs as compiled graphs, as a run does; the machine of the tests may be busy."""

import pytest
from hypothesis import settings

settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


@pytest.fixture(autouse=True, scope="module")
def _graph_mode(_one_device):
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE)
