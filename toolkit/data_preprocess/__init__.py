"""``python -m toolkit.data_preprocess``: text files and source trees to an indexed corpus, with its tokenizer."""
