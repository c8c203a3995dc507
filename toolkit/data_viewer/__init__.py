"""``python -m toolkit.data_viewer``: the samples of a run as its model gets them, trained tokens told from masked ones."""
