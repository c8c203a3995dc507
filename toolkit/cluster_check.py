"""``python -m toolkit.cluster_check``: ``mindllm check`` by the name it had before."""

from mindllm.cli.check import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
