"""Measured steps and kernels, and what a device is calibrated by them."""
