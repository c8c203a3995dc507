"""Text files and source trees as an indexed corpus, with its tokenizer; and what a run then reads of it."""
