"""How long a training step of a run takes on a described device, where the time goes, and what a change would bring."""
