"""Jobs as clusters start them: Slurm and Kubernetes, the files that are written for them, and where a task stands."""
