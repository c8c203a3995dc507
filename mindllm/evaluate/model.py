"""What lm-evaluation-harness calls a model: texts in, log-likelihoods and continuations out.

Texts become tokens as in the harness's own class for Hugging Face models (``lm_eval.models.huggingface``), so both see the same:
names of special tokens mean them, contexts are cut at the left, and a text without a beginning gets one.

How far an evaluation is goes to a callback that is told of every answer, or is a line a minute in the log of a training run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mindllm.data.chat.conversations import Conversation
from mindllm.data.chat.template import chat_template_of
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.errors import RunFailed
from mindllm.evaluate.answers import Answers
from mindllm.evaluate.requests import Pair, Score, generation_options, in_batches, scores
from mindllm.generate.generator import Generator
from mindllm.launch.heartbeat import heart
from mindllm.terminal.progress import Progress, unwatched

NAMES = {"loglikelihood": "scoring", "generate_until": "writing"}  # what a kind of request has the model do
SECONDS_BETWEEN_LINES = 60.0
logger = logging.getLogger(__name__)
MAX_NEW_TOKENS = 256  # the harness's own, for tasks that say nothing
KEPT_TEXTS = 1 << 12


class LoggedProgress:
    """Says in the log how many requests are answered and how long the others take, at most once a minute.

    Time counts from the first answer on, before which graphs are compiled.
    """

    def __init__(self) -> None:
        self.first = self.said = 0.0

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Take note that ``done`` of ``total`` are answered."""
        now = time.monotonic()
        if done <= 1:
            self.first = self.said = now
        if total is None or now - self.said < SECONDS_BETWEEN_LINES:
            return
        self.said = now
        left = timedelta(seconds=round((now - self.first) / (done - 1) * (total - done)))
        logger.info("%s: %d of %d answers, about %s left", what, done, total, left)


class EvaluatedModel(TemplateLM):
    """Answers requests with ``generator``, remembering each answer in ``answers`` as soon as it is there.

    Arguments:
        generator: shares prefixes; its texts are at most ``max_length`` tokens.
        batch_size: sequences that go through the model together.
        answers: those of an evaluation that was interrupted, and of the other processes of this one.
        progress: is told of every request that is answered.
        settings: keys of section ``generation`` of the model's generation_config.json, which the ``hf`` class applies, too.
    """

    def __init__(
        self,
        generator: Generator,
        batch_size: int = 8,
        answers: Answers | None = None,
        progress: Progress = unwatched,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        assert generator.tokenizer is not None
        self.generator = generator
        self.text: Tokenizer = generator.tokenizer
        self.batch_size = batch_size
        self.answers = answers or Answers()
        self.progress = progress
        self.settings = dict(settings or {})
        self._encoded = lru_cache(KEPT_TEXTS)(self._encode)

    @property
    def max_length(self) -> int:
        """Most tokens of a text."""
        return self.generator.max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if not self.generator.eos_ids:
            raise RunFailed("the tokenizer names no token that ends a text (eos_token of tokenizer_config.json)")
        return self.generator.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored from its first token on."""
        return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

    @property
    def tokenizer_name(self) -> str:
        """By which the harness tells tokenizers apart."""
        return self.text.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template, or nothing where none is asked for."""
        return chat_template_of(self.text).source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model was trained on, up to where the assistant goes on."""
        template = chat_template_of(self.text)
        conversation = Conversation(tuple(chat_history))
        rendered = template.render_prompt(conversation, "the conversation", to_answer=add_generation_prompt).text
        if add_generation_prompt:
            return rendered
        said = chat_history[-1]["content"].rstrip()
        return rendered[: rendered.rindex(said) + len(said)] + chat_history[-1]["content"][len(said) :]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of ``string``; before them what begins a text, unless it stands there already or is not wanted."""
        return list(self._encoded(string, add_special_tokens))

    def _encode(self, string: str, add_special_tokens: bool | None) -> tuple[int, ...]:
        ids, _ = self.text.encode_marked(string)
        begin = self.text.prefix_ids if add_special_tokens is not False else ()
        begins_already = add_special_tokens is None and begin and tuple(ids[: len(begin)]) == begin
        return tuple(ids) if begins_already else (*begin, *ids)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without special ones."""
        special = set(self.text.special_names)
        return self.text.decode([token for token in tokens if self.text.token(token) not in special])

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Score]:
        """Scores of continuations, each after its context: both as tokens, the context cut to what the model can see."""
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        known = self._answered("loglikelihood", pairs, self._scores)
        return [(float(known[pair][0]), bool(known[pair][1])) for pair in pairs]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows that each end where the next begins."""
        windows = [list(self._windows(*request.args)) for request in requests]
        pairs = [pair for several in windows for pair in several]
        known = self._answered("loglikelihood", pairs, self._scores)
        return [float(sum(known[pair][0] for pair in several)) for several in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first of the texts that end them."""
        keys, asked = [], {}
        times: dict[str, int] = {}
        for request in requests:
            context, wishes = request.args
            first = repr((context, sorted(wishes.items(), key=str)))
            times[first] = times.get(first, -1) + 1  # of the same request that draws, every repetition is another one
            key = (context, repr(sorted(wishes.items(), key=str)), times[first] if wishes.get("do_sample") else 0)
            keys.append(key)
            asked[key] = wishes
        known = self._answered("generate_until", keys, lambda missing: self._continuations(missing, asked))
        return [str(known[key]) for key in keys]

    def _answered(self, kind: str, keys: Sequence[Any], compute: Callable[[list[Any]], Iterator]) -> dict[Any, Any]:
        """The answers to ``keys``: those that are kept, and those that ``compute`` yields, shared by processes."""
        wanted = list(dict.fromkeys(keys))
        known = self.answers.of(kind, wanted)
        missing = self.answers.share([key for key in wanted if key not in known])
        self.progress(NAMES[kind], 0, len(missing))
        for done, (key, answer) in enumerate(compute(missing), 1):
            self.answers.put(kind, key, answer)
            known[key] = answer
            heart.beat("evaluation on tasks")
            self.progress(NAMES[kind], done, len(missing))
        return self.answers.completed(kind, wanted, known)

    def _scores(self, missing: list[Pair]) -> Iterator[tuple[Pair, Score]]:
        return scores(self.generator, missing, self.batch_size)

    def _continuations(self, missing: list[Any], asked: dict[Any, dict]) -> Iterator[tuple[Any, str]]:
        by_wishes: dict[str, list[Any]] = {}
        for key in missing:
            by_wishes.setdefault(key[1], []).append(key)
        for keys in by_wishes.values():
            wishes = dict(normalize_gen_kwargs(asked[keys[0]], MAX_NEW_TOKENS))
            ends = tuple(map(self.text.token, self.generator.eos_ids))
            options = generation_options(wishes, self.max_length, ends, self.settings)
            room = self.max_length - options.max_new_tokens
            prompts = {key: tuple(self.tok_encode(key[0])[-room:]) for key in keys}
            for key, tokens in in_batches(self.generator, prompts, options, self.batch_size):
                yield key, postprocess_generated_text(self.tok_decode(tokens), list(options.stops), None)

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        """The end of both that fits; what is scored is never cut."""
        if len(continuation) > self.max_length:
            raise RunFailed(
                f"a continuation of {len(continuation)} tokens is to be scored, and the model works on {self.max_length} "
                "(model.model_config.seq_length): give --max_length where it can do more"
            )
        first = max(0, len(context) + len(continuation) - self.max_length - 1)
        return tuple(context[first:]), tuple(continuation)

    def _windows(self, text: str) -> Iterator[Pair]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        for context, continuation in map(make_disjoint_window, windows):
            yield tuple(context), tuple(continuation)
