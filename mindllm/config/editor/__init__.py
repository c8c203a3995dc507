"""What an editor is told of a run's YAML: JSON Schemas made of the schema itself and of the key tables of MindFormers."""
