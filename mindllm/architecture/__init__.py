"""What a decoder is made of, as frozen values: parts, layers, weights and their shapes, FLOPs, optimizer state.

The ground floor of the house: no YAML, no pydantic, and of mindllm nothing else. ``config`` derives an
:class:`~mindllm.architecture.decoder.Architecture` from the keys of a run.
"""
