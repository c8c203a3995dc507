"""Proves a parallel configuration: all ranks, executed on one CPU, against the same model on a single device."""
