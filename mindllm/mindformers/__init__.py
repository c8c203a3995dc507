"""A YAML of MindFormers (1.3 to 2.1, legacy and mcore names) as a run of ours, with an account of every key.

:func:`translate` makes the document, ``keys_*.py`` are the tables it reads, :func:`is_mindformers` tells whose a YAML is.
"""
