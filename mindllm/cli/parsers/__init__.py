"""The options of every verb, apart from what it does: they import nothing heavy, so that ``--help`` is there at once."""
