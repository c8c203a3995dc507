"""Reading a run's YAML: documents that remember lines, bases, overrides, former names, mistakes; and writing it."""
