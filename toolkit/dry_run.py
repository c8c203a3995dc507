"""``python -m toolkit.dry_run``: ``mindllm dry-run`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.dry_run")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
