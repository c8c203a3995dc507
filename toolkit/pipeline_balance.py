"""``python -m toolkit.pipeline_balance``: ``mindllm plan`` by the name it had before."""

from mindllm.cli.plan import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
