"""Is this node ready for a run? Each finding is good, or says what to do."""
