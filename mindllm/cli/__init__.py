"""The verbs of ``mindllm``, one file each; their table is ``registry.py``."""

from mindllm.command import CommandParser


def is_key(name: str) -> bool:
    """Return whether a YAML may have a key at its top level, ours or MindFormers'; this is asked when something is wrong."""
    from mindllm.config import RunConfig  # takes long to import
    from mindllm.mindformers.reader import KEYS

    return name in RunConfig.model_fields or any(key.partition(".")[0] == name for key in KEYS)


CommandParser.key_tests.append(is_key)
