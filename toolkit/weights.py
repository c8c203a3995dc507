"""``python -m toolkit.weights``: ``mindllm weights`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.weights")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
