"""The pretend device: the one place that touches MindSpore's private surface."""
