"""Trains what a YAML of MindFormers 1.8 describes, with its public functions; the script of its repository has more options.

Run by the Python that MindFormers is installed in: python run_mindformer.py --config qwen3_32b_4_layers.yaml
"""

import argparse

from mindformers.core.context import build_context
from mindformers.tools.register import MindFormerConfig
from mindformers.trainer import Trainer
from mindformers.utils.file_utils import set_output_path

parser = argparse.ArgumentParser(description="Trains what a YAML of MindFormers describes.")
parser.add_argument("--config", required=True, help="the YAML")
config = MindFormerConfig(parser.parse_args().config)
set_output_path(config.output_dir)
build_context(config)
Trainer(config).train()
