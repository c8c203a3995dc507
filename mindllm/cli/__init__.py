"""The verbs of ``mindllm``: each parses a command line, calls the library, and renders what it returns."""
