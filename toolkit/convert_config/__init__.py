"""A YAML of MindFormers as one of ours, with an account of every key."""
