"""mindllm: static-parallel training of large language models with MindSpore, proved before it is launched."""

__version__ = "0.1.0"
