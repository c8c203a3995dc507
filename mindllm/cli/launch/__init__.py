"""Verbs of ``mindllm --help`` under ``launch``: nodes and processes."""
