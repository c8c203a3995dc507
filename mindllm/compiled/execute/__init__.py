"""Every rank's compiled graph executed in lock-step on one CPU.

Read in this order: ``machine`` (one rank), ``exchange`` and ``lockstep`` (between ranks), ``kernels`` (what computes a node).
"""
