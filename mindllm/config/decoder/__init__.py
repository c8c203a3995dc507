"""The keys of ``model.model_config``, and the architecture that they describe."""
