"""``python -m toolkit.dry_run``: ``mindllm dry-run`` by the name it had before."""

from mindllm.cli.dry_run import main
from mindllm.command import run_command

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
