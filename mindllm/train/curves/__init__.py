"""Draws the loss of one or several runs."""
