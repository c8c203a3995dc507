"""Command-line tools: one folder per tool, each run with ``python -m toolkit.<tool>``."""
