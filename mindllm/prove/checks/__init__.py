"""What answers the questions of a proof: a file for each piece of work, with a formula where there is one."""
