"""A compiled rank as typed values: read from MindSpore's formats, kept in files, ordered as it runs, and what it costs."""
