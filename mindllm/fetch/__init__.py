"""Model directories from Hugging Face's hub and ModelScope: asked for, never fetched by a run."""
