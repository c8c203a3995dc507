"""What layers, stages and ends cost a planner: by dry run, by formula, from measurements."""
