"""Installs the packages ``mindllm`` and ``toolkit``."""

from setuptools import find_packages, setup

REQUIRED = [
    "mindspore>=2.10,<2.11",  # what everything here was measured with
    "numpy>=1.26,<2",  # MindSpore's wheels are built against numpy 1: bf16 and eager operators break with numpy 2
    "pyyaml",
    "pydantic>=2.11",
    "sentencepiece>=0.2.3",  # places of tokens in the text
    "tokenizers",
    "safetensors",
    "ml_dtypes",  # bfloat16 as a type of numpy: most published weights have it
    "jinja2",  # chat templates are programs of its language; its sandbox runs them
    "pyarrow<22",  # parquet, the form of most public corpora; later releases want numpy 2
    "zstandard",  # .zst, the compression of large public corpora
    "rich",
    "matplotlib",
    "scipy>=1.13",  # least squares without negative memories
    "highspy>=1.15",  # HiGHS: linear and integer programs of the planner, with rows added to a solved one
    "decorator",  # graph-kernel fusion on CPU imports it without declaring it
]
TEST = [
    "pytest",
    "pytest-timeout",
    "pytest-xdist",  # two files of tests at a time
    "hypothesis",
    "ruff",
    "mypy",
    "types-PyYAML",
    "tiktoken",  # the reading of its files is compared with it
    "torch==2.13.0",
    "transformers",
]

setup(
    name="mindllm",
    version="0.1.0",
    description="Static-parallel training of large language models with MindSpore, proved before it is launched",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["mindllm", "mindllm.*", "toolkit", "toolkit.*"]),
    package_data={
        "mindllm.compiled.device": ["*.c"],  # what stands in for device software is compiled where it is used
        "toolkit.cluster_check": ["forms/*.yaml", "forms/base/*.yaml"],
        "toolkit.dry_run": ["*.html"],
        "toolkit.ir_inspect": ["page.html", "bundled/*"],
        "toolkit.pipeline_balance": ["schedule.html"],
        "mindllm.planning.costs": ["devices/*.yaml"],
    },
    install_requires=REQUIRED,
    extras_require={"test": TEST},
)
