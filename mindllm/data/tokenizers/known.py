"""What tokenizers do that their model directories say in Python only, by their ``tokenizer_class``: that code is never run.

Read in tokenization_qwen.py and qwen_generation_utils.py of Qwen-7B-Chat, tokenization_chatglm.py of chatglm3-6b and glm-4-9b,
generation_utils.py of Baichuan2-7B-Chat, modeling_internlm.py of internlm-chat-7b. The templates write what that code builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# How GPT-4's tokenizer cuts a text into words (tiktoken, cl100k_base), and Qwen's, which takes digits one by one.
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = CL100K.replace("{1,3}", "")

CHATML_OF_QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '' if loop.first else '\n' }}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}{{ '\n' }}<|im_start|>assistant\n{{ '' }}{% endif %}"
)
# The code encodes "\n" and what follows apart, each with the space that sentencepiece puts before a text.
CHATGLM3 = (
    "[gMASK]sop{% for message in messages %}<|{{ message.role if message.role != 'tool' else 'observation' }}|>"
    "{{ message.metadata or '' }}{{ '\n ' + message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATGLM4 = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role if message.role != 'tool' else 'observation' }}|>"
    "{{ message.metadata or '' }}{{ '\n' + message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BAICHUAN2 = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<reserved_107>{{ message.content }}"
    "{% if loop.last %}{{ eos_token }}{% endif %}{% elif message.role == 'system' %}{{ message.content }}"
    "{% else %}<reserved_106>{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<reserved_107>{% endif %}"
)
BAICHUAN = BAICHUAN2.replace("<reserved_106>", "<reserved_102>").replace("<reserved_107>", "<reserved_103>")
INTERNLM = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}<|Bot|>:{{ message.content }}<eoa>{{ '\n' }}"
    "{% elif message.role == 'system' %}<|System|>:{{ message.content }}{{ '\n' }}"
    "{% else %}<|User|>:{{ message.content }}<eoh>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Bot|>:{% endif %}"
)


@dataclass(frozen=True)
class KnownTokenizer:
    """``appended``: special tokens after the vocabulary of the file, in order. ``prefix``: put before a text to be continued.

    ``marks``: tokens of the vocabulary itself that only the template writes, with their ids, which tell vocabularies of one
    class apart. ``ends``: end an answer beside the end of a text. ``pattern`` cuts texts before a tiktoken file's merges;
    ``nfc``: texts are normalised so. ``template``: how a chat is written.
    """

    appended: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    pattern: str = ""
    nfc: bool = False
    template: str = ""


_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_NOTHING = KnownTokenizer()
KNOWN = {
    "QWenTokenizer": KnownTokenizer(
        appended=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))),
        ends=("<|im_end|>",),
        pattern=QWEN,
        nfc=True,
        template=CHATML_OF_QWEN,
    ),
    "ChatGLMTokenizer": KnownTokenizer(
        appended=("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *_GLM_ROLES),
        prefix=("[gMASK]", "sop"),
        ends=("<|user|>", "<|observation|>"),
        template=CHATGLM3,
    ),
    "ChatGLM4Tokenizer": KnownTokenizer(
        appended=(
            *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", *_GLM_ROLES),
            *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        ),
        prefix=("[gMASK]", "<sop>"),
        ends=("<|user|>", "<|observation|>"),
        pattern=CL100K,
        template=CHATGLM4,
    ),
    "BaichuanTokenizer": KnownTokenizer(marks={"<reserved_106>": 195, "<reserved_107>": 196}, template=BAICHUAN2),
    "InternLMTokenizer": KnownTokenizer(ends=("<eoa>",), template=INTERNLM),
}
# The first Baichuan 13B has the class of the second, and other tokens at its places.
_OLDER = {"BaichuanTokenizer": KnownTokenizer(marks={"<reserved_102>": 195, "<reserved_103>": 196}, template=BAICHUAN)}
OWN_TEMPLATES = frozenset(known.template for table in (KNOWN, _OLDER) for known in table.values())


def known_tokenizer(tokenizer_class: str, id_of: Callable[[str], int | None] | None = None) -> KnownTokenizer:
    """What the code of a class does with the vocabulary of ``id_of``; nothing where the class is not known or needs no code."""
    candidates = [table[tokenizer_class] for table in (KNOWN, _OLDER) if tokenizer_class in table]
    if id_of is None:
        return next(iter(candidates), _NOTHING)
    fitting = (known for known in candidates if all(id_of(name) == id for name, id in known.marks.items()))
    return next(fitting, _NOTHING)
