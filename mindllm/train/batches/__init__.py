"""From a configuration to the batches of its run."""
