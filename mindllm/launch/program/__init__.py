"""``run_llm.py`` of an installed mindllm, in a directory of its own: where a script is, Python looks for modules first."""
