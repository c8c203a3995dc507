"""Runs that nobody wrote a YAML for: what is chosen for a person who names a model, data and a device, and why."""
