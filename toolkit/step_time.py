"""``python -m toolkit.step_time``: ``mindllm time`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.step_time")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
