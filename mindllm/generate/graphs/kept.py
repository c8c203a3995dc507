"""Compiled graphs of prediction on disk, so that the next start with the same shapes loads them.

They lie in the user's cache (``~/.cache/mindllm/graphs``), those of a session in a directory that is named by all they depend on.
``MINDLLM_GRAPHS=0`` switches it off, as ``context.compile_cache`` and ``context.save_graphs`` do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import mindspore as ms

from mindllm.config import ModelConfig, RunConfig
from mindllm.jobs.store import Store
from mindllm.sources import source_digest
from mindllm.train.compile_cache import store_graphs

VARIABLE = "MINDLLM_GRAPHS"
GRAPHS = Store("graphs", "graph-", max_entries=64)  # directories of some megabytes each
COMPILED_FOR = ("device_target", "jit_config", "max_call_depth", "memory_optimize_level", "enable_graph_kernel")


class KeptGraphs:
    """Keeps the graphs that a process compiles at first, by the model and the context, versions and sources, and their shapes.

    MindSpore stays with the first directory it is given, and looks in it for graphs by the order in which they are compiled. So
    those of one session are kept together, and what is compiled later for other prompts is not.
    """

    def __init__(self, config: RunConfig, model: ModelConfig) -> None:
        context = config.context.model_dump(mode="json")
        settings = {name: context[name] for name in COMPILED_FOR}
        self._common = [model.model_dump(mode="json"), settings, ms.__version__, sys.version]
        wanted = config.context.compile_cache and not config.context.save_graphs
        # MindSpore reads the script that was started, and fails where there is none.
        self._is_used = wanted and os.environ.get(VARIABLE, "1") != "0" and Path(sys.argv[0]).is_file()

    @contextlib.contextmanager
    def compiling(self, *shape: object) -> Iterator[None]:
        """What is compiled inside, for ``shape``, is loaded or kept."""
        if not self._is_used:
            yield
            return
        self._is_used = False
        text = json.dumps([*self._common, *shape, source_digest()], sort_keys=True, default=str)
        with store_graphs(GRAPHS, hashlib.sha256(text.encode()).hexdigest()[:16]):
            yield
