"""Verbs of ``mindllm --help`` under ``plan``: how a run is laid out, and how long it takes."""
