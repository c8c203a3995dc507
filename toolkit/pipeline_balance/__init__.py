"""Plans pipeline stages, interleaving and recomputation: the fastest split that fits the memory, with a proven bound."""
