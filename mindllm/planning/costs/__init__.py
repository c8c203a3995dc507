"""Costs of layers, stages and ends: by formula, or fitted to measurements."""
