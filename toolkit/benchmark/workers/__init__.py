"""What the benchmarks of the same names start: one side of a comparison, each in a process of its own."""
