"""Fine-tuning: adapters and frozen weights as transformations of a built model, and adapters in files.

Read in this order: ``config/tuning.py`` (the YAML section), ``config/decoder/adapter_targets.py`` (the resulting adapters),
``adapter`` (the cell), ``transform``.
"""
