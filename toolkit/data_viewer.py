"""``python -m toolkit.data_viewer``: ``mindllm view`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.data_viewer")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
