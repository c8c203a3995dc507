"""Small references in PyTorch of the families that ``transformers`` does not have, written from their published descriptions.

``random_tiny(name)`` is a tiny random model: ``model(input_ids)`` gives logits in fp32, ``model.state_dict()`` has the names of
the published files, ``model.save(directory)`` writes a directory as published, ``model.greedy(input_ids, count)`` continues it.
"""

from functools import partial

from references import chatglm, internlm2, llama_names, qwen, telechat
from references.parts import Reference

REFERENCES = {
    **{family: partial(llama_names.random_tiny, family) for family in llama_names.FAMILIES},
    "qwen": qwen.random_tiny,
    "chatglm3": chatglm.random_tiny,
    "chatglm3-32k": partial(chatglm.random_tiny, rope_ratio=50),
    "internlm2": internlm2.random_tiny,
    "telechat": telechat.random_tiny,
}


def random_tiny(name: str, seed: int = 0, **changes: object) -> Reference:
    """The reference ``name`` of :data:`REFERENCES` with random weights; ``changes`` are of its ``config.json``."""
    return REFERENCES[name](seed=seed, **changes)
