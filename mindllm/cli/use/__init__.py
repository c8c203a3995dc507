"""Verbs of ``mindllm --help`` under ``use``: what a trained model is good for."""
