"""What becomes of every key of MindFormers, in one table by section."""
