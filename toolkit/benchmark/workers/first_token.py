"""One start of :mod:`toolkit.benchmark.first_token`: ``python -m … SIDE run.yaml`` continues the prompt of a YAML."""

from __future__ import annotations

import sys
import time
from typing import Any


def mindllm(path: str) -> None:
    """The command, as it is."""
    from mindllm.main import main

    main(["predict", "--config", path])


def graphs(path: str) -> None:
    """The same without kernels on the host."""
    from mindllm.generate.host import HostModel

    HostModel.can_compute = staticmethod(lambda config, length: False)  # type: ignore[method-assign]
    mindllm(path)


class Streamer:
    """Writes every token when it is there, and knows when."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.times: list[float] = []

    def put(self, ids: Any) -> None:
        """Called by ``generate`` with the prompt, then with each token."""
        self.times.append(time.perf_counter())
        sys.stdout.write(self.tokenizer.decode(ids.reshape(-1), skip_special_tokens=False))
        sys.stdout.flush()

    def end(self) -> None:
        """Called by ``generate`` behind the last token."""


def transformers(path: str) -> None:
    """What a user of transformers writes."""
    import yaml

    with open(path) as file:
        config = yaml.safe_load(file)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = config["load_checkpoint"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    inputs, streamer = (
        tokenizer(config["input_data"], return_tensors="pt", add_special_tokens=False),
        Streamer(tokenizer),
    )
    with torch.inference_mode():
        new = config["generation"]["max_new_tokens"]
        model.generate(**inputs, max_new_tokens=new, do_sample=False, streamer=streamer)
    count, seconds = len(streamer.times) - 2, streamer.times[-1] - streamer.times[1]
    sys.stderr.write(f"decode: {count} tokens, {count / seconds:.1f} tokens/s\n")


SIDES = {"mindllm": mindllm, "graphs": graphs, "transformers": transformers}

if __name__ == "__main__":
    SIDES[sys.argv[1]](sys.argv[2])
