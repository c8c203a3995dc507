"""Libraries that only some commands need, and the extra of the package that brings each (``pip install 'mindllm[planner]'``)."""

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


def advice(error: ModuleNotFoundError) -> str:
    """What to install where one of them is missing; empty for any other module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    return f"this needs the library {module}, which is not installed: pip install 'mindllm[{extra}]'" if extra else ""
