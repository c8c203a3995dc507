"""``python -m toolkit.loss_curve``: ``mindllm loss-curve`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.loss_curve")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
