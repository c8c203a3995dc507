"""How long a training step takes on a described device: operators, exchanges, stages, the whole step, and its calibration."""
