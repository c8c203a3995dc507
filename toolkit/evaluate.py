"""``python -m toolkit.evaluate``: ``mindllm evaluate`` by the name it had before."""

from mindllm.cli.evaluate import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
