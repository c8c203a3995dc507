"""Which token comes next: sampling, beams, penalties, and when a sequence ends."""
