"""Keys that public YAMLs write and MindFormers does not read: what its runs did is what ours do.

Found in its sources, 1.3 to 2.1: a configuration class takes what it has parameters for, and keeps the rest as attributes that no
network looks at. A legacy Llama's head is always ``hidden_size / num_heads`` wide, and has no dropout.
"""

from __future__ import annotations

from mindllm.mindformers.reading import AS_WRITTEN, Reading

MODEL = "model.model_config"
UNREAD = {  # class of the configuration: its keys
    "LlamaConfig": ("kv_channels", "rotary_emb_base", "rotary_pct", "emb_dropout_prob"),
    "ChatGLM2Config": ("no_recompute_layers",),
}


def drop_unread(reading: Reading) -> None:
    """Claims the keys that are not read, before anything is made of them; ``as_written`` takes them at their word."""
    if reading.as_written:
        return
    kind = reading.word(f"{MODEL}.type")
    for name in UNREAD.get(kind, ()):
        key = f"{MODEL}.{name}"
        if reading.has(key):
            reading.idle(key, f"{kind} of MindFormers does not read it; {AS_WRITTEN} takes it at its word")
