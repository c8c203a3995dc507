"""Operators and exchanges of a step, by part of a layer, and how long each takes on a device."""
