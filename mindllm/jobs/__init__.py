"""Work in other processes: how they are started and ended, the cores and the memory that they share, results that are stored."""
