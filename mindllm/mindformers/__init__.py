"""YAMLs of MindFormers (1.3 to 2.1, legacy and mcore names) as runs of mindllm, with an account of every key.

:mod:`mindllm.mindformers.reader` is the entry point: ``config`` calls it for a YAML with keys that only MindFormers has. Every
other module has the keys of one subject and the functions that translate them.
"""
