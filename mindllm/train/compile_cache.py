"""The compiled training step on disk, so that the next start of the same run loads it instead of compiling.

MindSpore numbers the graphs it stores and checks little more than the script that was started. So a directory holds the graphs of
one step only, and is named by all that the step depends on: configuration, sources, versions.

With graph-kernel fusion the fused kernels are stored next to it (``MS_COMPILER_CACHE_PATH``, see ``device``). A loaded graph
names the same kernels differently, so the first start from it compiles them once more. There are about 60, however many layers
a model has, and they take longer than the graph of a few layers: for such a model only the kernels are stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator

from mindllm.config import RunConfig
from mindllm.config.compiled_keys import compiled_keys
from mindllm.jobs.store import Store
from mindllm.sources import software_key
from mindllm.train.device import cache_directory, uses_graph_kernels

PREFIX, FUSED = "step-", "f"
MANY_LAYERS = (
    12  # from which on a graph takes longer than the kernels: with adapters 6 layers take 20 CPU seconds, kernels 40
)


@contextlib.contextmanager
def cached_compilation(config: RunConfig) -> Iterator[None]:
    """Load graphs that are first compiled in the block from the cache, or store them there."""
    fuses = uses_graph_kernels(config)
    few = fuses and config.model.config.num_layers < MANY_LAYERS
    if not config.context.compile_cache or config.context.save_graphs or few:
        yield
        return
    store = Store(cache_directory(config).absolute(), PREFIX, max_entries=1)
    with store_graphs(store, f"{step_key(config)}{FUSED if fuses else ''}"):
        yield


@contextlib.contextmanager
def store_graphs(store: Store, key: str) -> Iterator[None]:
    """Load the graphs of an entry in the block, or store those that are compiled in it."""
    import mindspore as ms

    with store.open_directory(key) as directory:
        ms.set_context(enable_compile_cache=True, compile_cache_path=str(directory))
        try:
            yield
        finally:
            ms.set_context(enable_compile_cache=False, compile_cache_path=str(store.directory))


def step_key(config: RunConfig) -> str:
    """Return a hash of what a compiled step depends on: the configuration (:func:`compiled_keys`), sources, versions."""
    text = json.dumps([compiled_keys(config), software_key()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
