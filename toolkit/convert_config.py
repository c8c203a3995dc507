"""``python -m toolkit.convert_config``: ``mindllm convert`` by the name it had before."""

from mindllm.cli.registry import former

main = former("toolkit.convert_config")

if __name__ == "__main__":
    from mindllm.command import run_command

    run_command(main)
