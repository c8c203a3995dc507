"""The life of a run as a job: its directory, its ranks, how it begins again and goes on."""
