"""Families of models: a small file of facts each. The mathematics is one decoder for all of them."""
