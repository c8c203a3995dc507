"""``python -m toolkit.loss_curve``: ``mindllm loss-curve`` by the name it had before."""

from mindllm.cli.loss_curve import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
