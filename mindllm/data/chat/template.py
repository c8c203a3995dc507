"""Chat templates: a conversation as the text a model was trained on, and the parts of it that belong to the assistant.

A template is a program from the tokenizer's directory. It runs in jinja's immutable sandbox, with access to messages and names of
special tokens only, in a separate process with limited time and memory. The text of the assistant is located exactly or the row
is
refused: by the template's own ``{% generation %}`` marks, else by rendering the conversation turn by turn. A row is refused if
the template drops a part of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mindllm.data.chat import template_program
from mindllm.data.chat.conversations import Conversation, is_learned
from mindllm.data.chat.template_program import BEGIN, END, MARKS, SEAM, receive, send
from mindllm.data.chat.traces import Tracer, border, call_forms, is_python_text, without_traces
from mindllm.data.tokenizers.special_tokens import BUILT_IN_TEMPLATES, without_allowed
from mindllm.data.tokenizers.tokenizer import Tokenizer
from mindllm.data.tokenizers.vocabularies import gguf_chat_template
from mindllm.errors import UserError, shortened
from mindllm.families.hugging_face import read_json
from mindllm.gguf import gguf_file
from mindllm.outside import read_text
from mindllm.process.exit_hooks import when_leaving

PLAIN = """\
{{- bos_token or '' -}}
{%- for message in messages -%}
{%- if not loop.first %}{{ '\\n\\n' }}{% endif -%}
{%- if message.role == 'assistant' -%}
{{ '### Response:\\n' }}{% generation %}{{ message.content | trim }}{{ eos_token or '' }}{% endgeneration %}
{%- else -%}
{{ {'user': '### Instruction:\\n', 'tool': '### Input:\\n'}.get(message.role, '') }}{{ message.content | trim }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif -%}
"""
BUILT_IN = {PLAIN, *BUILT_IN_TEMPLATES}  # the templates that need no other process
LONGEST_SOURCE = 1 << 20  # characters; the longest public templates have some ten thousand
PLACES = re.compile(f"([{SEAM}{BEGIN}{END}])")
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TRAINING_DATE = "2024-07-26"  # date of strftime_now in training rows: the default of Llama 3's templates
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
TOOL_USE = "tool_use"  # the template of several that transformers takes where there are tools
LOADER = "train_dataset.data_loader.config"
MOST_NAMED = 5  # parts of a row that a template leaves out
Span = tuple[int, int]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenderedChat:
    """``text`` of a conversation and the ``spans`` of it, in characters, that are learned: turns of the assistant with their end.

    ``seams`` are places inside words of the conversation that spell the name of a special token: there the text is cut before
    it is encoded, so that nobody can say a special token.
    """

    text: str
    spans: tuple[Span, ...]
    seams: tuple[int, ...]


class ChatTemplate:
    """A template with its special tokens, such as ``{"eos_token": "</s>"}``.

    Args:
        special_names: names that the tokenizer encodes as special tokens, without those that data may contain.
        variables: additional variables, such as ``{"enable_thinking": False}``; those of a row take precedence.
        for_tools: the template of conversations with tools, if it differs.

    Raises:
        UserError: ``source`` is not a valid template.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, Any],
        special_names: Sequence[str],
        variables: Mapping[str, Any] | None = None,
        for_tools: ChatTemplate | None = None,
    ) -> None:
        self.origin = origin
        self.source = source
        self.for_tools = for_tools
        self.has_marks = bool(GENERATION.search(source))
        self._special_tokens = dict(special_tokens)
        self._special_names = [name for name in special_names if len(name) > 1]
        self._variables = dict(variables or {})
        self._refuse_reserved_variables(self._variables, LOADER)
        self._warned: set[str] = set()
        self._is_own = source in BUILT_IN
        if len(source) > LONGEST_SOURCE:
            raise UserError(f"{origin}: not a chat template, it has {len(source):,} characters")
        try:
            self.names = names_read(source, apart=not self._is_own)
        except TemplateFailed as error:
            line = f", line {error.line}" if error.line is not None else ""
            raise UserError(f"{origin}: not a chat template{line}: {error}") from None

    @property
    def shows_tools(self) -> bool:
        """Return True if the template can render tools."""
        return self.for_tools is not None or "tools" in self.names

    def render(self, conversation: Conversation, place: str) -> RenderedChat:
        """Return the text of ``conversation`` and the parts of it that are learned; ``place`` names the row in errors.

        Raises:
            UserError: the template refuses the conversation, leaves out a part of it, or the borders of a turn are not exact.
        """
        if self.for_tools is not None and conversation.tools:
            return self.for_tools.render(conversation, place)
        self._warn(conversation)
        chat = self._chosen_form(self._spelled_conversation(conversation, place), place, TRAINING_DATE)
        marked = self._by_marks(chat, place) if self.has_marks else self._by_turns(chat, place)
        if lost := self._lost(chat, marked, place, TRAINING_DATE):
            raise UserError(
                f"{place}: {self.origin} leaves out {_named(lost)}; write a template that has it in {LOADER}.chat_template, "
                "or remove it from the row"
            )
        return _without_marks(marked)

    def render_prompt(self, conversation: Conversation, place: str, *, to_answer: bool = True) -> RenderedChat:
        """Return the text of ``conversation`` at the date of today; ``to_answer``: up to where the next answer begins.

        Raises:
            UserError: the template refuses the conversation.
        """
        if self.for_tools is not None and conversation.tools:
            return self.for_tools.render_prompt(conversation, place, to_answer=to_answer)
        self._warn(conversation)
        now = datetime.now().isoformat()
        chat = self._chosen_form(self._spelled_conversation(conversation, place), place, now)
        return _without_marks(self._fill([self._values(chat, prompt=to_answer)], place, now)[0])

    def _warn(self, conversation: Conversation) -> None:
        """Log once each that the template cannot show tools, and that it writes a date."""
        if conversation.tools and not self.shows_tools and "tools" not in self._warned:
            self._warned.add("tools")
            logger.warning(
                "%s cannot show tools: it does not read the variable tools. Name another template in %s.chat_template, or remove "
                "tools from the rows",
                self.origin,
                LOADER,
            )
        if "strftime_now" in self.names and "date" not in self._warned:
            self._warned.add("date")
            logger.info("%s writes the date: %s in rows that are learned, today in prompts", self.origin, TRAINING_DATE)

    def _chosen_form(self, chat: Conversation, place: str, now: str) -> Conversation:
        """Return the conversation with its calls in the first form that the template writes whole, else in the best one."""
        if not any(message.get("tool_calls") for message in chat.messages):
            return chat
        best, fewest, refused = None, 0, None
        for messages in call_forms(chat.messages):
            form = replace(chat, messages=tuple(messages))
            try:
                (text,) = self._fill([self._values(form)], place, now)
            except UserError as error:
                refused = refused or error
                continue
            lost = len(self._lost(form, text, place, now)) + is_python_text(text, messages)
            if not lost:
                return form
            if best is None or lost < fewest:
                best, fewest = form, lost
        if best is None:
            assert refused is not None
            raise refused
        return best

    def _lost(self, chat: Conversation, text: str, place: str, now: str) -> list[str]:
        """Return the names of the parts that are missing in ``text``, the rendered conversation."""
        tracer = Tracer(chat.messages, chat.tools)
        traced = replace(chat, messages=tuple(tracer.messages), tools=tracer.tools)
        try:
            return tracer.lost(self._fill([self._values(traced)], place, now)[0])
        except UserError:  # the template checks names or values of the row
            return tracer.absent(PLACES.sub("", text))

    def _by_marks(self, chat: Conversation, place: str) -> str:
        """Return the text with the template's own marks around each turn that is learned."""
        (marked,) = self._fill([self._values(chat)], place, TRAINING_DATE)
        turns = [message for message in chat.messages if message["role"] == "assistant"]
        if marked.count(BEGIN) != len(turns):
            raise UserError(
                f"{place}: {self.origin} marks {marked.count(BEGIN)} parts with generation, the assistant has {len(turns)} turns"
            )
        before, *parts = marked.split(BEGIN)
        for part, turn in zip(parts, turns, strict=True):
            before += f"{BEGIN}{part}" if is_learned(turn) else part.replace(END, "", 1)
        return before

    def _by_turns(self, chat: Conversation, place: str) -> str:
        """Render up to each learned turn and through it, which is how the whole begins where turns are written alike."""
        messages = chat.messages
        turns = [index for index, message in enumerate(messages) if is_learned(message)]
        before = [self._values(replace(chat, messages=messages[:index]), prompt=True) for index in turns if index]
        through = [self._values(replace(chat, messages=messages[: index + 1])) for index in turns]
        full_text, *parts = self._fill([self._values(chat), *before, *through], place, TRAINING_DATE)
        begins, ends = parts[: len(before)], parts[len(before) :]
        if len(begins) < len(ends):
            begins.insert(0, self._greeting_header(chat, ends[0], place))
        borders = [(len(begin), len(end)) for begin, end in zip(begins, ends, strict=True)]
        if not all(
            full_text.startswith(end) and end.startswith(begin) for begin, end in zip(begins, ends, strict=True)
        ):
            borders = self._traced_borders(chat, turns, full_text, place)
        marked, position = "", 0
        for index, (begin, end) in zip(turns, borders, strict=True):
            if not position <= begin <= end:
                raise self._inexact(index, place)
            marked += full_text[position:begin] + BEGIN + full_text[begin:end] + END
            position = end
        return marked + full_text[position:]

    def _traced_borders(self, chat: Conversation, turns: Sequence[int], full_text: str, place: str) -> list[Span]:
        """Return the borders of turns in ``whole``, where the template writes them differently than at the end of a conversation.

        A turn begins after the text that the template puts between the previous message and an answer. It ends with the text that
        the template puts after the last words of the turn. Both have to follow the same words in ``whole``.
        """
        tracer = Tracer(chat.messages, chat.tools)
        traced = replace(chat, messages=tuple(tracer.messages), tools=tracer.tools)
        cuts = [(index, True) for index in turns] + [(index + 1, False) for index in turns]
        values = [self._values(replace(traced, messages=traced.messages[:cut]), prompt) for cut, prompt in cuts if cut]
        try:
            traced_text, *texts = self._fill([self._values(traced), *values], place, TRAINING_DATE)
        except UserError:
            raise self._inexact(turns[0], place) from None
        borders = [border(text, traced_text) for text in texts]
        if turns[0] == 0:
            borders.insert(0, len(self._greeting_header(chat, full_text, place)))
        spans = list(zip(borders[: len(turns)], borders[len(turns) :], strict=True))
        for index, (begin, end) in zip(turns, spans, strict=True):
            if begin is None or end is None or without_traces(traced_text) != full_text:
                raise self._inexact(index, place)
        return [(begin or 0, end or 0) for begin, end in spans]

    def _inexact(self, index: int, place: str) -> UserError:
        return UserError(
            f"{place}: {self.origin} writes turn {index} differently inside the conversation than at its end, so the "
            "assistant's words cannot be told apart exactly. Mark them in the template with {% generation %} and "
            f"{{% endgeneration %}}, and name that file in {LOADER}.chat_template; or give the turn the weight 0"
        )

    def _greeting_header(self, chat: Conversation, greeting: str, place: str) -> str:
        """Return the beginning of ``greeting``, a conversation that opens with the assistant, up to the text of that turn.

        There is no earlier message to render, so the header of the turn is taken from an answer to a question.
        """
        question = replace(chat, messages=({"role": "user", "content": "?"},))
        values = [self._values(question), self._values(question, prompt=True)]
        answered, prompt = self._fill(values, place, TRAINING_DATE)
        header = prompt.removeprefix(answered) if prompt.startswith(answered) else ""
        if not header or header not in greeting:
            raise UserError(
                f"{place}: begins with the assistant, and {self.origin} does not say where its words begin; give the turn the "
                "weight 0, or mark its words in the template with {% generation %} and {% endgeneration %}"
            )
        return greeting[: greeting.index(header) + len(header)]

    def _values(self, chat: Conversation, prompt: bool = False) -> dict[str, Any]:
        """Return the variables of the template for a conversation; ``prompt``: only up to the answer."""
        values = dict(zip(RESERVED_VARIABLES, (chat.messages, chat.tools, None, prompt), strict=True))
        return {**self._special_tokens, **self._variables, **chat.variables, **values}

    def _fill(self, values: list[dict[str, Any]], place: str, now: str) -> list[str]:
        try:
            return (render_here if self._is_own else render_apart)(self.source, values, now)
        except TemplateFailed as error:
            raise UserError(f"{place}: {self.origin} refuses this conversation ({error})") from None

    def _refuse_reserved_variables(self, variables: Mapping[str, Any], place: str) -> None:
        reserved = next((name for name in RESERVED_VARIABLES if name in variables), None)
        if reserved is not None:
            raise UserError(f"{place}: chat_template_kwargs.{reserved}: is a variable of the row itself; remove it")

    def _spelled_conversation(self, conversation: Conversation, place: str) -> Conversation:
        """Return the conversation with a seam in every name of a special token inside its words."""
        self._refuse_reserved_variables(conversation.variables, place)
        return Conversation(
            tuple(
                {key: self._spelled(value, place) for key, value in message.items()}
                for message in conversation.messages
            ),
            self._spelled(conversation.tools, place),
            {key: self._spelled(value, place) for key, value in conversation.variables.items()},
        )

    def _spelled(self, value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {self._spelled(key, place): self._spelled(entry, place) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._spelled(entry, place) for entry in value]
        if not isinstance(value, str):
            return value
        if any(mark in value for mark in MARKS):
            raise UserError(f"{place}: holds U+FDD0 to U+FDD3, which Unicode keeps from being text; remove them")
        for name in self._special_names:
            value = value.replace(name, f"{name[0]}{SEAM}{name[1:]}")
        return value


def _named(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - MOST_NAMED} more" if len(parts) > MOST_NAMED else ""
    return ", ".join(parts[:MOST_NAMED]) + more


def chat_template_of(
    tokenizer: Tokenizer,
    chat_template: str = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    allowed_special_tokens: Sequence[str] = (),
) -> ChatTemplate:
    """Return the template in file ``chat_template``, else that of the tokenizer, else that of its class, else a plain one.

    A directory has a ``chat_template.jinja``, with others in ``additional_chat_templates``, or one or several by name in its
    ``tokenizer_config.json``. A GGUF file contains its template; other files in its directory are ignored. Of several,
    conversations with tools use "tool_use" and others "default". ``chat_template_kwargs`` are additional variables, and
    ``allowed_special_tokens`` in messages stay tokens.

    Raises:
        UserError: an invalid template, or an allowed token that is not a special token.
    """
    names = tokenizer.special_tokens, without_allowed(tokenizer, allowed_special_tokens)
    if not chat_template and tokenizer.chat_template and (gguf := gguf_file(tokenizer.path)):
        texts = {"default": tokenizer.chat_template, TOOL_USE: gguf_chat_template(gguf, TOOL_USE)}
        sources = {name: (text, f"tokenizer.chat_template of {gguf}") for name, text in texts.items() if text}
    else:
        sources = _sources(Path(tokenizer.path).parent, chat_template)
    if "default" not in sources:
        default = tokenizer.chat_template
        origin = "the chat template of its class" if default else "the plain chat template"
        sources = {"default": (default or PLAIN, origin)}
    variables = chat_template_kwargs
    for_tools = ChatTemplate(*sources[TOOL_USE], *names, variables) if TOOL_USE in sources else None
    return ChatTemplate(*sources["default"], *names, variables, for_tools)


def _sources(directory: Path, default: str) -> dict[str, tuple[str, str]]:
    """Return the sources of templates by name, each with its origin; nothing where there is none."""
    file = Path(default) if default else directory / "chat_template.jinja"
    if default and not file.is_file():
        raise UserError(f"{file}: no such chat template")
    config = directory / "tokenizer_config.json"
    if not file.is_file():
        return _sources_in(config) if config.is_file() else {}
    for_tools = directory / "additional_chat_templates" / f"{TOOL_USE}.jinja"
    files = {"default": file, **({TOOL_USE: for_tools} if not default and for_tools.is_file() else {})}
    return {name: (_text(path), str(path)) for name, path in files.items()}


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except OSError as error:
        raise UserError(f"{file}: no chat template: {error.strerror}") from None


def _sources_in(path: Path) -> dict[str, tuple[str, str]]:
    """Return the templates of a ``tokenizer_config.json``: one, or a list of names and texts that has a default."""
    entries = read_json(path).get("chat_template")
    named: dict[str, Any] = {"default": entries}
    if isinstance(entries, list):
        named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if "default" not in named:
        names = ", ".join(map(shortened, named)) or "none by name"
        raise UserError(f"{path}: chat_template: has {names} and no default; name a file in chat_template")
    for source in map(named.get, ("default", TOOL_USE)):
        if source is not None and not isinstance(source, str):
            expected = "must be a text, or a list of names and texts"
            raise UserError(f"{path}: chat_template: {expected} (value {shortened(source)})")
    return {
        name: (source, f"chat_template of {path}")
        for name, source in named.items()
        if isinstance(source, str) and source
    }


def _without_marks(marked: str) -> RenderedChat:
    text: list[str] = []
    seams: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    places = {SEAM: seams, BEGIN: begins, END: ends}
    position = 0
    for part in PLACES.split(marked):
        if part in places:
            places[part].append(position)
        else:
            text.append(part)
            position += len(part)
    return RenderedChat("".join(text), tuple(zip(begins, ends, strict=True)), tuple(seams))


SECONDS = 10.0  # CPU seconds per conversation: a thousand times those of a long one
MEMORY = 1 << 30
NO_DATE = "0001-01-01"
# The paths of this interpreter, not the directory of the program, whose files have names of the standard library.
START = "import sys, runpy; sys.path[:] = {paths}; sys.argv[1:] = ['{memory}']; runpy.run_path({file!r}, run_name='__main__')"


class TemplateFailed(Exception):
    """Error of a template; ``line`` is the line of its source with a syntax error."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def render_apart(source: str, variables: list[dict[str, Any]], now: str) -> list[str]:
    """Return the text of the template ``source`` for each of ``variables`` at the date ``now``, computed in the other process.

    Raises:
        TemplateFailed: the template is invalid, raises, or exceeds the limits of time and memory.
    """
    return _checked(_ask(source, variables, now))["texts"]


def render_here(source: str, variables: list[dict[str, Any]], now: str) -> list[str]:
    """Return the text of a template of mindllm, computed in this process; raises as :func:`render_apart`."""
    return _checked(template_program.rendered(source, variables, now))["texts"]


def names_read(source: str, apart: bool) -> frozenset[str]:
    """Return the names of the variables and functions that a template reads from outside; raises as :func:`render_apart`."""
    answer = _ask(source, [], NO_DATE) if apart else template_program.rendered(source, [], NO_DATE)
    return frozenset(_checked(answer)["names"])


def _ask(source: str, variables: list[dict[str, Any]], now: str) -> dict[str, Any]:
    with _state.lock:
        return _state.running().ask(source, variables, now)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer that has texts; raises TemplateFailed for one of an error."""
    if "texts" not in answer:
        raise TemplateFailed(answer["error"], answer.get("line"))
    return answer


class _Process:
    """The other process. It ends with its standard input, so it does not outlive this one."""

    def __init__(self) -> None:
        command = START.format(paths=json.dumps(sys.path), memory=MEMORY, file=template_program.__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, source: str, variables: list[dict[str, Any]], now: str) -> dict[str, Any]:
        """Send a request and wait for its answer; raise if there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            request = {"source": source, "variables": variables, "now": now, "seconds": SECONDS}
            send(self._process.stdin, request)
            answer = receive(self._process.stdout)
        except BaseException as error:
            self.end()  # what comes next on the pipe would be the answer to this
            if not isinstance(error, OSError):
                raise
            answer = None
        if answer is not None:
            return answer
        code = self.end()
        if code == -signal.SIGPROF:
            return {"error": f"it computes for over {SECONDS:g} seconds"}
        return {
            "error": f"it takes more memory than any conversation needs, or is nested too deeply (exit code {code})"
        }

    def end(self) -> int:
        """End the process if it runs, and return its exit state."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class _State:
    """What this process has: none or one other process, and a lock, because its pipe takes one request at a time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the state after a fork: the pipe belongs to the parent, and its lock may be locked."""
        self.lock = threading.Lock()
        self.process: _Process | None = None

    def running(self) -> _Process:
        if self.process is None or not self.process.is_running:
            self.process = _Process()
        return self.process

    def end(self) -> None:
        if self.process is not None:
            self.process.end()
            self.process = None


_state = _State()
os.register_at_fork(after_in_child=_state.forget)
when_leaving(_state.end)
