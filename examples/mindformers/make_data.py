"""Writes a MindRecord file with the columns that MindFormers' models of the new kind read; its tokens mean nothing.

Run by the Python that MindFormers is installed in: python make_data.py --seq_length 4096 random.mindrecord
"""

import argparse

import numpy as np
from mindspore.mindrecord import FileWriter

INTEGERS, NUMBERS = {"type": "int32", "shape": [-1]}, {"type": "float32", "shape": [-1]}
COLUMNS = {"input_ids": INTEGERS, "labels": INTEGERS, "loss_mask": NUMBERS, "position_ids": INTEGERS}

parser = argparse.ArgumentParser(description="Writes a MindRecord file of random tokens.")
parser.add_argument("file")
parser.add_argument("--seq_length", type=int, required=True, help="tokens of a row")
parser.add_argument("--rows", type=int, default=64)
options = parser.parse_args()

tokens = np.random.default_rng(0).integers(0, 100, (options.rows, options.seq_length + 1), dtype=np.int32)
writer = FileWriter(options.file, 1, overwrite=True)
writer.add_schema(COLUMNS)
writer.write_raw_data(
    [
        {
            "input_ids": row[:-1],
            "labels": row[1:],
            "loss_mask": np.ones(options.seq_length, np.float32),
            "position_ids": np.arange(options.seq_length, dtype=np.int32),
        }
        for row in tokens
    ]
)
writer.commit()
