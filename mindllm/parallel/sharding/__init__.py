"""How every operator of a model is split over the devices of a stage.

``cells`` has one function for each class of cell, from the cell to the layouts of its operators; ``table`` puts them together by
path and applies them. Layouts name the axes of the mesh, one entry per dimension: ``("dp", None)`` is a matrix whose rows are
split over data parallel.
"""

from mindllm.parallel.sharding.cells import sharding_table
from mindllm.parallel.sharding.table import FOLLOWERS, Sharding, Table, apply_sharding, on

__all__ = ["FOLLOWERS", "Sharding", "Table", "apply_sharding", "on", "sharding_table"]
