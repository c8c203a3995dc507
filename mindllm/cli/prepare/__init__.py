"""Verbs of ``mindllm --help`` under ``prepare``: models, weights, data and YAMLs before a run."""
