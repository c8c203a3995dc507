"""MindSpore's own dry run of a rank: its memory block by block, and the order in which its operators run."""
