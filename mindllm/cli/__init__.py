"""The verbs of ``mindllm``, one file each; their table is ``registry.py``."""

from mindllm.command import CommandParser


def is_key(name: str) -> bool:
    """Return True if a YAML of mindllm or MindFormers may have this top-level key; called when an option is unknown."""
    from mindllm.config import RunConfig  # slow to import
    from mindllm.mindformers.reader import KEYS

    return name in RunConfig.model_fields or any(key.partition(".")[0] == name for key in KEYS)


CommandParser.key_tests.append(is_key)
