"""Tokenizers from the files that models ship, their special tokens, and the training of new ones."""
