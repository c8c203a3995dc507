"""What was trained beside a frozen model, in files: of our checkpoints and of PEFT; and together with its base again.

Read in this order: ``adapter`` (the value, and how a base is known again), ``peft``, ``bottlenecks``, ``merging``.
"""

from mindllm.train.checkpoint.adapters.adapter import Adapter, Base, fingerprint
from mindllm.train.checkpoint.adapters.merging import adapted, merged, unmerged

__all__ = ["Adapter", "Base", "adapted", "fingerprint", "merged", "unmerged"]
