"""``python -m toolkit.convert_config``: ``mindllm convert`` by the name it had before."""

from mindllm.cli.convert import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
