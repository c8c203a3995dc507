"""Solvers print nothing, whatever release of HiGHS there is."""

import subprocess
import sys

MAKES_SOLVERS = """
from mindllm.planning.highs import new_solver
print("before")
for _ in range(2):
    solver = new_solver()
    solver.addVar(0, 1)
    solver.run()
print("after")
"""


def test_a_process_that_solves_prints_its_own_words_alone():
    done = subprocess.run([sys.executable, "-c", MAKES_SOLVERS], capture_output=True, text=True, check=True)
    assert done.stdout == "before\nafter\n"
