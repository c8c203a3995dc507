"""Files of weights as they come, read lazily: every reader gives ``name -> TensorSource`` and opens nothing but headers.

``tensors_of_file`` knows one file by its name; ``tensors_of_directory`` those of a directory of Hugging Face.
"""

from mindllm.train.checkpoint.formats.files import code_of, tensors_of_directory, tensors_of_file, weight_files

__all__ = ["code_of", "tensors_of_directory", "tensors_of_file", "weight_files"]
