"""Training: step cells, the loop, engines, optimizers, callbacks, checkpoints, and the job around them."""
