"""From a configuration to a finished run: which engine executes it, and the run modes that train and evaluate."""
