"""``python -m toolkit.data_preprocess``: ``mindllm data`` by the name it had before."""

from mindllm.cli.data import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
