"""Writes the page that documents every key of a run's YAML, from the schema itself."""
