"""Where independent pieces of work are done: by processes of this machine, or by the nodes of a Ray cluster."""
