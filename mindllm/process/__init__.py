"""The process a command runs in: signals, its end, temporary files, and the memory of the machine it may take."""
