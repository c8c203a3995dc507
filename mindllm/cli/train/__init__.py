"""Verbs of ``mindllm --help`` under ``train``: train a model, and what its losses came to."""
