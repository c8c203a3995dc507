"""Optional libraries of some commands, and the extra of the package that installs each (``pip install 'mindllm[planner]'``)."""

from __future__ import annotations

EXTRAS = {
    "scipy": "planner",
    "highspy": "planner",
    "matplotlib": "plots",
    "pyarrow": "data",
    "zstandard": "data",
    "lm_eval": "eval",
    "ray": "ray",
    "tensorboardX": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "sqlalchemy": "mlflow",
    "gguf": "gguf",
    "huggingface_hub": "fetch",
    "httpx": "fetch",
}


def install_hint(error: ModuleNotFoundError) -> str:
    """Return how to install an optional library that is missing; empty for any other module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    return f"the library {module} is not installed; run pip install 'mindllm[{extra}]'" if extra else ""
