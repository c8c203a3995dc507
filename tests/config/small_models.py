"""The flat keys of a small dense model, which tests of layers start from."""

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "intermediate_size": 64,
    "seq_length": 32,
}
