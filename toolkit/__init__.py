"""Command-line tools: one folder per tool, each run with ``python -m toolkit.<tool>``."""

import sys

from mindllm.interrupts import own_interrupts

if sys.argv[:1] == [
    "-m"
]:  # being started with python -m, and not yet further than this; not where a program imports tools
    own_interrupts()
