"""From a configuration to the batches of its run, one ahead of the step."""
