"""Planning for zero-bubble schedules, whose order of operations is searched, too."""
