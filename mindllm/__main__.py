"""``python -m mindllm``: the command ``mindllm`` by the Python it is to run in."""

from mindllm.main import command

if __name__ == "__main__":
    command()
