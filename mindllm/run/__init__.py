"""From a configuration to a finished run: selection of the engine, and the run modes that train and evaluate."""
