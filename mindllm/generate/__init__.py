"""Text from a trained model: prefill and decode graphs over a static key/value cache, sampling, streaming."""
