"""Verbs of ``mindllm --help`` under ``prove``: whether a run may be launched."""
