"""The graph of any rank of a cluster, compiled by MindSpore itself on a machine without an accelerator."""
