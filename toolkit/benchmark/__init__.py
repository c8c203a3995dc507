"""Speed of mindllm beside other implementations: same sizes, same threads, taking turns in one run."""
