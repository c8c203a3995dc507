"""``python -m toolkit.tune``: ``mindllm search`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.tune")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
