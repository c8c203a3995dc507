"""Weights as codes of 4 or 8 bits with a scale for every group: their one form here, and how weights are rounded to it.

Read in this order: ``tables`` (what codes mean), ``codes`` (the form), ``nearest``, ``gptq``, ``awq`` (three ways of rounding);
``held`` and ``integers`` are the tensors of a model and of an operator of Ascend.
Arrays of numpy alone: no framework, no files.
"""
