"""Chat templates as programs: the sandbox that compiles and renders them, and the process that does so within limits.

The file imports nothing of the project, so that :mod:`template_process` can start it in a moment. Requests and answers are JSON,
with their length in front: ``{"source": …, "variables": [{…}, …], "now": …, "seconds": …}`` is answered by ``{"texts": [...],
"names": [...]}`` or ``{"error": …, "line": …}``. ``names`` are the variables that the template reads, where none are given.

Templates have the environment of transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import IO, Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode's noncharacters are never text: they mark places inside the rendered text and are taken out again.
SEAM, BEGIN, END, TRACE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
MARKS = SEAM + BEGIN + END + TRACE
LONGEST_TEXT = 64 << 20  # characters of a rendered text
LONGEST_MESSAGE = 300  # characters of an error
LENGTH_BYTES = 8
NOT_ASCII = re.compile(f"[^\\x00-\\x7f{MARKS}]+")


class GenerationMarks(Extension):
    """The tag ``{% generation %} ... {% endgeneration %}`` of Hugging Face: marks its text by BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call of ``_mark`` with its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


@lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    """Return the template in jinja's immutable sandbox; raise TemplateSyntaxError for invalid ``source``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationMarks]
    )
    # Constants are computed where the limits hold, not where the template is compiled.
    environment.intercepted_binops = frozenset(("*", "**", "+", "//", "/", "%", "-"))
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _format_now
    return environment.from_string(source)


_now = datetime.min


def _format_now(form: str) -> str:
    return _now.strftime(form)


def rendered(source: str, variables: list[dict[str, Any]], now: str) -> dict[str, Any]:
    """Return the text of a template for each of ``variables`` at the date ``now`` (ISO format), or an error on one line."""
    global _now
    try:
        _now = datetime.fromisoformat(now)
        template = compiled(source)
        if not variables:
            return {"texts": [], "names": _names_read(template, source)}
        texts = [template.render(**values) for values in variables]
        if sum(map(len, texts)) > LONGEST_TEXT:
            return {"error": f"it writes over {LONGEST_TEXT:,} characters"}
        return {"texts": texts}
    except TemplateSyntaxError as error:
        return {"error": _line(error.message or ""), "line": error.lineno}
    except MemoryError:
        return {"error": "it takes more memory than any conversation needs"}
    except RecursionError:
        return {"error": "it is nested too deeply, or calls itself without end"}
    except Exception as error:  # a template may raise any error, which becomes one line
        return {"error": _line(str(error)) or type(error).__name__}


def _names_read(template: Template, source: str) -> list[str]:
    """Return the variables and functions that a template reads from outside."""
    tree = template.environment.parse(source)
    functions = {node.name for node in tree.find_all(nodes.Name)} & template.environment.globals.keys()
    return sorted(meta.find_undeclared_variables(tree) | functions)


def _line(message: str) -> str:
    """Return a message as one line of bounded length."""
    return " ".join(message[: 2 * LONGEST_MESSAGE].split())[:LONGEST_MESSAGE]


def _raise(message: str) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return ``value`` as JSON; of ``ensure_ascii`` our marks are exempt."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return NOT_ASCII.sub(lambda found: json.dumps(found.group())[1:-1], text) if ensure_ascii else text


def send(stream: IO[bytes], content: Any) -> None:
    """Write one request or answer."""
    data = json.dumps(content, default=str).encode()
    stream.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read one request or answer; return None at the end of the stream."""
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    data = stream.read(int.from_bytes(length, "little"))
    return json.loads(data) if len(data) == int.from_bytes(length, "little") else None


def serve(memory: int) -> None:
    """Answer requests until the other side ends, in at most ``memory`` bytes; SIGPROF ends a request that computes too long."""
    _limit_memory(memory)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while (request := receive(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = rendered(request["source"], request["variables"], request["now"])
        try:
            send(answers, answer)
        except MemoryError:
            send(answers, {"error": "it writes more text than any conversation needs"})
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(memory: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # a system without such limits keeps that of time
        return


if __name__ == "__main__":
    serve(int(sys.argv[1]))
