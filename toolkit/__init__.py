"""Tools for developers of mindllm, and the three command names that users of MindFormers know."""

import sys

from mindllm.process.interrupts import own_interrupts

if sys.argv[:1] == [
    "-m"
]:  # being started with python -m, and not yet further than this; not where a program imports tools
    own_interrupts()
