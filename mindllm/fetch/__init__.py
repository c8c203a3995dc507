"""Model directories from Hugging Face's hub: asked for, never fetched by a run."""
