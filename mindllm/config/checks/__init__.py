"""Cross checks of a run: combinations of keys that cannot work, each with what to write instead, by subject."""
