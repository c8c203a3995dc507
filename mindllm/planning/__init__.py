"""What the planner of pipelines computes with: problems, plans, their judge, and the solvers of every schedule."""
