"""Projections in codes, as files of Hugging Face hold them: one file per format, each from stored tensors to ``Codes``.

``module`` has what readers share, ``directory`` puts them in the place of the tensors of a directory.
"""
