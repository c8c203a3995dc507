"""The order of operations on every stage, and the simulator that times it."""
