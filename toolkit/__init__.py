"""Command-line tools: one folder per tool, each run with ``python -m toolkit.<tool>``."""

import sys

from mindllm.interrupts import leave_on_interrupt

if sys.argv[:1] == [
    "-m"
]:  # being started with python -m, and not yet further than this; not where a program imports tools
    leave_on_interrupt()
