"""Fine-tuning: adapters and frozen weights as transformations of a built model, and adapters in files.

Read in this order: ``config/tuning.py`` (what the YAML says), ``config/decoder/adapter_targets.py`` (which adapters follow),
``adapter`` (the cell), ``transform``.
"""
