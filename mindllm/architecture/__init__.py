"""What a decoder is made of, as frozen values: parts, layers, weights and their shapes, FLOPs, optimizer state.

It imports neither YAML, pydantic nor another package of mindllm, except errors. ``config`` derives an
:class:`~mindllm.architecture.decoder.Architecture` from the keys of a run.
"""
