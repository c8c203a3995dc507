"""``python -m toolkit.pipeline_balance``: ``mindllm plan`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.pipeline_balance")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
