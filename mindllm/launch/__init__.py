"""Several processes as one job: started together, watched, ended together (``python -m mindllm.launch --help``).

MindSpore's own ``msrun`` notices the death of a process after 40 seconds, and never when all die while they connect.
"""
