"""Special tokens (beginning, end, padding) and added tokens, from the files of a tokenizer's directory or its class."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mindllm.errors import UserError, shortened
from mindllm.families.hugging_face import read_json

END_OF_TEXT = "<|endoftext|>"
USUAL_NAMES = {  # looked for where no file names the token
    "bos": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos": (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
}
LARGEST_ID = 2**31 - 1


class HasSpecialNames(Protocol):
    """The file of a tokenizer and the names of its special tokens."""

    path: Path
    special_names: Sequence[str]


@dataclass(frozen=True)
class AddedToken:
    """A token outside the vocabulary of the tokenizer file. A token that is not ``special`` is found in every text."""

    name: str
    id: int
    special: bool = True


@dataclass(frozen=True)
class SpecialTokens:
    """Names of special tokens and, if only generation_config.json has them, ids. ``adds_bos`` is None if unknown.

    ``more_names``: additional special tokens, which the vocabulary may have. ``tokenizer_class``: from tokenizer_config.json.
    ``roles``: tokens by all other keys of these files, such as ``{"unk_token": "<unk>"}``, for chat templates.
    """

    names: dict[str, str] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    adds_bos: bool | None = None
    added: tuple[AddedToken, ...] = ()
    more_names: tuple[str, ...] = ()
    tokenizer_class: str = ""
    roles: dict[str, str] = field(default_factory=dict)

    def template_variables(self, name_of: Callable[[int], str], ids: Mapping[str, int | None]) -> dict[str, Any]:
        """Return the variables of chat templates: the tokens by their keys, as transformers has them, and the list of others.

        ``ids`` are those of bos, eos and pad, which ``name_of`` names.
        """
        listed = {"additional_special_tokens": list(self.more_names)} if self.more_names else {}
        return {**self.roles, **listed, **{f"{role}_token": name_of(id) for role, id in ids.items() if id is not None}}

    def id_of(
        self, role: str, vocabulary: Callable[[str], int | None], vocab_size: int, own: int | None = None
    ) -> int | None:
        """Return the id of the token of ``role`` (bos, eos, pad): by name, by id, the tokenizer's ``own``, or by a usual name.

        An id that is not below ``vocab_size`` belongs to the model, not to the tokenizer.
        """
        if role in self.names:
            return vocabulary(self.names[role])
        if self.ids.get(role, vocab_size) < vocab_size:
            return self.ids[role]
        if own is not None:
            return own
        return next((id for name in USUAL_NAMES[role] if (id := vocabulary(name)) is not None), None)


def read_special_tokens(directory: Path) -> SpecialTokens:
    """Read the files next to a tokenizer in ``directory`` that exist.

    They are tokenizer_config.json, special_tokens_map.json, added_tokens.json and generation_config.json.

    Raises:
        UserError: a file is not a JSON object, or a value has a wrong type.
    """
    config_file, map_file = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    config, generation_file = _read(config_file), directory / "generation_config.json"
    sources = ((config_file, config), (map_file, _read(map_file)))
    generation = _read(generation_file)
    names: dict[str, str] = {}
    ids: dict[str, int] = {}
    for role in USUAL_NAMES:
        key = f"{role}_token"
        named = [_name(path, key, source[key]) for path, source in sources if source.get(key) not in (None, "")]
        if named:
            names[role] = named[0]
        token_id = _first_id(generation_file, f"{key}_id", generation.get(f"{key}_id"))
        if token_id is not None:
            ids[role] = token_id
    more = [name for path, source in sources for name in _names(path, source)]
    roles = {
        key: name
        for _, source in reversed(sources)
        for key, value in source.items()
        if key.endswith("_token") and key.removesuffix("_token") not in USUAL_NAMES
        if isinstance(name := value.get("content") if isinstance(value, dict) else value, str) and name
    }
    return SpecialTokens(
        names=names,
        ids=ids,
        adds_bos=_typed(config_file, "add_bos_token", config.get("add_bos_token"), bool, "true or false"),
        added=tuple(_added(directory, config)),
        more_names=tuple(dict.fromkeys(more)),
        roles=roles,
        tokenizer_class=_typed(config_file, "tokenizer_class", config.get("tokenizer_class"), str, "a text") or "",
    )


def without_allowed(tokenizer: HasSpecialNames, allowed: Sequence[str]) -> list[str]:
    """Return the special tokens of a tokenizer without those that data may contain.

    Raises:
        UserError: an allowed token is not a special token.
    """
    unknown = next((name for name in allowed if name not in tokenizer.special_names), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, tokenizer.special_names, n=5, cutoff=0.3)
        suggested = f"; the nearest: {', '.join(close)}" if close else ""
        raise UserError(
            f"{tokenizer.path}: {shortened(unknown)} (allowed_special_tokens) is not a special token of the tokenizer{suggested}"
        )
    return [name for name in tokenizer.special_names if name not in allowed]


def count_names(text: str, names: Iterable[str]) -> dict[str, int]:
    """Return how often each of ``names`` that appears in ``text`` does so."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name[:2], []).append(name)
    present = (name for start, group in groups.items() if start in text for name in group)
    return {name: count for name in present if (count := text.count(name))}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _names(path: Path, source: dict[str, Any]) -> list[str]:
    """Return the ``additional_special_tokens`` of a file."""
    names = source.get("additional_special_tokens")
    if names is not None and not isinstance(names, list):
        raise _wrong(path, "additional_special_tokens", names, "a list of names of tokens")
    return [_name(path, "additional_special_tokens", value) for value in names or []]


def _name(path: Path, key: str, value: Any) -> str:
    name = value.get("content") if isinstance(value, dict) else value
    if not isinstance(name, str) or not name:
        raise _wrong(path, key, value, 'the name of a token, or an object with its "content"')
    return name


def _first_id(path: Path, key: str, value: Any) -> int | None:
    """Return the first id; None for a negative one, which some files have."""
    values = value if isinstance(value, list) else [value]
    for entry in values:
        if entry is not None and (type(entry) is not int or entry > LARGEST_ID):
            raise _wrong(path, key, value, "the id of a token, or a list of them")
    first = next(iter(values), None)
    return first if first is not None and first >= 0 else None


def _added(directory: Path, config: dict[str, Any]) -> Iterator[AddedToken]:
    """Return the tokens of added_tokens.json and ``added_tokens_decoder``; the latter has more details."""
    path = directory / "tokenizer_config.json"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise _wrong(path, "added_tokens_decoder", decoder, "an object of ids and tokens")
    ids = set()
    for text, value in decoder.items():
        name = _name(path, f"added_tokens_decoder.{shortened(text)}", value)
        if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) > LARGEST_ID:
            raise _wrong(path, "added_tokens_decoder", text, "an object whose keys are ids of tokens")
        ids.add(name)
        yield AddedToken(name, int(text), not isinstance(value, dict) or value.get("special") is not False)
    path = directory / "added_tokens.json"
    for name, id in _read(path).items():
        if type(id) is not int or not 0 <= id <= LARGEST_ID:
            raise _wrong(path, shortened(name), id, "the id of the token")
        if name and name not in ids:
            yield AddedToken(name, id)


def _typed(path: Path, key: str, value: Any, kind: type, expected: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise _wrong(path, key, value, expected)
    return value


def _wrong(path: Path, key: str, value: Any, expected: str) -> UserError:
    return UserError(f"{path}: {key}: must be {expected} (value {shortened(value)})")


# How GPT-4's tokenizer cuts a text into words (tiktoken, cl100k_base), and Qwen's, which takes digits one by one.
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = CL100K.replace("{1,3}", "")

QWEN_CHATML = (
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
    """What the code of a tokenizer class adds.

    ``appended``: special tokens after the vocabulary of the file, in order. ``prefix``: tokens before a text to continue.
    ``marks``: tokens of the vocabulary that only the template writes, with their ids, which distinguish vocabularies of a class.
    ``ends``: tokens that end an answer, in addition to the end of text. ``pattern`` splits texts before the merges of a tiktoken
    file; ``nfc``: texts are normalized. ``template``: chat template.
    """

    appended: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    pattern: str = ""
    nfc: bool = False
    template: str = ""


_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_NO_ADDITIONS = KnownTokenizer()
KNOWN = {
    "QWenTokenizer": KnownTokenizer(
        appended=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))),
        ends=("<|im_end|>",),
        pattern=QWEN,
        nfc=True,
        template=QWEN_CHATML,
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
BUILT_IN_TEMPLATES = frozenset(known.template for table in (KNOWN, _OLDER) for known in table.values())


def known_tokenizer(tokenizer_class: str, id_of: Callable[[str], int | None] | None = None) -> KnownTokenizer:
    """Return what the code of a class adds to the vocabulary of ``id_of``; empty for unknown classes."""
    candidates = [table[tokenizer_class] for table in (KNOWN, _OLDER) if tokenizer_class in table]
    if id_of is None:
        return next(iter(candidates), _NO_ADDITIONS)
    fitting = (candidate for candidate in candidates if all(id_of(name) == id for name, id in candidate.marks.items()))
    return next(fitting, _NO_ADDITIONS)
