"""``python -m toolkit.ir_inspect``: ``mindllm inspect`` by the name it had before."""

from mindllm.cli.inspect import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
