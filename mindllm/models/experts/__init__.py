"""Mixtures of experts: the router, experts with a capacity and without, and the tokens that each is given."""
