"""A tokenizer whose tokens are characters, as the files of a model directory."""

import json
import string

from tokenizers import Tokenizer, decoders, models

END = "<|end|>"
CHARACTERS = [*string.printable[:95], "\n"]
LENGTH = 256


def write_tokenizer(directory, template=None):
    vocabulary = {character: place for place, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    said |= {"clean_up_tokenization_spaces": False, "model_max_length": LENGTH}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(said | ({"chat_template": template} if template else {}))
    )
