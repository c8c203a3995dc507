"""Whether every pipeline stage of a run fits into device memory, what fills it, and what would make it fit."""
