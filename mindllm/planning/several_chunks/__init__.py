"""Planning with several chunks per stage: a linear program over paths, local search, branch and bound."""
