"""Reading a configuration needs no heavy library, so that --help and errors come at once."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_the_configuration_imports_nothing_heavy():
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import mindllm.config
heavy = {"mindspore", "numpy", "torch", "scipy", "matplotlib"} & {name.split(".")[0] for name in sys.modules}
print(*heavy)
"""
    result = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
