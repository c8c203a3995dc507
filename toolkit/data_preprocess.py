"""``python -m toolkit.data_preprocess``: ``mindllm data`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.data_preprocess")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
