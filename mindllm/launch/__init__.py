"""Several processes as one job: started together, watched, ended together (``python -m mindllm.launch --help``).

MindSpore's own ``msrun`` notices the death of a process after 40 seconds, and never when all die while they connect.
"""

import sys

from mindllm.process.interrupts import own_interrupts

if (
    sys.argv[:1] == ["-m"] and "mindllm.launch" in sys.orig_argv
):  # being started with python -m, and not yet further than this
    own_interrupts()
