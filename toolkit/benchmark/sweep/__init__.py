"""``python -m toolkit.benchmark.sweep``: one run YAML under many changes of its keys, every point a process of its own."""
