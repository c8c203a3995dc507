"""``python -m toolkit.preflight``: ``mindllm preflight`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.preflight")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
