"""``python -m toolkit.ir_inspect``: ``mindllm inspect`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.ir_inspect")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
