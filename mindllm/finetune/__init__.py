"""Fine-tuning: adapters and frozen weights as transformations of a built model, and adapters in files.

Read in this order: ``config/tuning.py`` (the YAML section), ``config/model.py`` (the resulting adapters),
``adapter`` (the cell), ``transform``.
"""
