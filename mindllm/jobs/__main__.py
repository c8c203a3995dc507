"""The server of tasks (:mod:`mindllm.jobs.worker`)."""

from mindllm.command import run_command
from mindllm.jobs.worker import main

run_command(main)
