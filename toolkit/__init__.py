"""The verbs of ``mindllm`` by the names they had before, ``python -m toolkit.<tool>``, and tools for developers of mindllm."""

import sys

from mindllm.process.interrupts import own_interrupts

if sys.argv[:1] == [
    "-m"
]:  # being started with python -m, and not yet further than this; not where a program imports tools
    own_interrupts()
