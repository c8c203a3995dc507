"""``python -m toolkit.step_time``: ``mindllm time`` by the name it had before."""

from mindllm.cli.time import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
