"""Templates that are hostile or no templates: one line that names the file, in bounded time and memory, and life goes on."""

import json
import multiprocessing
import os

import pytest
from chats import CHATML, chat_tokenizer, template_of

from mindllm.data.chat import template as template_process
from mindllm.data.chat.conversations import Conversation
from mindllm.data.chat.template import LONGEST_SOURCE, PLAIN, ChatTemplate
from mindllm.errors import UserError

CHAT = Conversation(({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}))
TIME = r"computes for over 0\.3 seconds"
MEMORY = r"memory|characters|text"
EITHER = f"{TIME}|{MEMORY}"
LOOP = "{% for x in range(99999) %}"


def grown(step):
    """Sixty times ``n.s`` becomes what ``step`` says."""
    return "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = " + step + " %}{% endfor %}"


# name: (template, what is said)
HOSTILE = {
    "nested loops": (LOOP * 4 + "{% set y = x %}" + "{% endfor %}" * 4, TIME),
    "nested loops that write": (LOOP * 3 + "x" + "{% endfor %}" * 3, EITHER),
    "a long text": ("{{ 'x' * 10**10 }}", MEMORY),
    "a long list": ("{{ [1] * 10**10 }}", MEMORY),
    "a power": ("{{ 10**(10**10) }}", EITHER),
    "a text that doubles": (grown("n.s ~ n.s"), EITHER),
    "a text that doubles by replacing": (grown("n.s.replace('x', 'xx')"), EITHER),
    "a wide format": ("{{ '%1000000000d' % 1 }}", EITHER),
    "a wide format of new style": ("{{ '{:>10000000000}'.format(1) }}", MEMORY),
    "a wide filter": ("{{ 'x' | center(10**10) }}", MEMORY),
    "padding": ("{{ 'x'.ljust(10**10) }}", MEMORY),
    "lists in lists": (grown("[n.s, n.s]") + "{{ n.s }}", EITHER),
    "lists in lists compared": (
        "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
        "{% endfor %}{{ n.a == n.b }}",
        TIME,
    ),
    "a recursive macro": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "nested too deeply"),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        TIME,
    ),
    "a recursive loop": ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "nested too deeply"),
    "lorem ipsum": ("{{ lipsum(n=10**9) }}", f"{EITHER}|undefined"),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply|not a chat template"),
    "deep lists": ("{{ " + "[" * 50_000 + "]" * 50_000 + " }}", "nested too deeply|memory|not a chat template"),
    "many loops in one another": (
        ("{% for x in 'a' %}" * 200) + ("{% endfor %}" * 200),
        f"nested|indentation|{EITHER}",
    ),
    "an include": ("{% include '/etc/passwd' %}", "no loader"),
    "an import": ("{% import 'os' as os %}", "no loader"),
    "the classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
    "the environment": ("{{ self.__init__.__globals__ }}", "unsafe|undefined"),
    "a change of the messages": ("{{ messages.append(messages) }}", "unsafe|not safely callable"),
    "division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "a message of two lines": ("{{ raise_exception('a\\nb' * 1000) }}", "refuses this conversation"),
    "no end": ("{% for m in messages %}", "not a chat template, line 1"),
    "an unknown tag": ("{% import_os %}", "not a chat template, line 1"),
    "a file of another kind": ("\x89PNG {{", "not a chat template, line 1"),
}


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.3)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line_and_the_next_one_works(name, hurried):
    source, says = HOSTILE[name]
    with pytest.raises(UserError, match=says) as error:
        ChatTemplate(source, "model/chat_template.jinja", {}, []).render_prompt(CHAT, "row 3")
    message = str(error.value)
    assert "model/chat_template.jinja" in message
    assert "\n" not in message
    assert len(message) < 500
    assert ChatTemplate(CHATML, "good", {}, []).render_prompt(CHAT, "row 4").text.startswith("<|im_start|>user\nq")


def test_each_request_has_its_own_time(monkeypatch):
    """Together they compute for longer than the limit, which is that of one conversation, not of a run."""
    monkeypatch.setattr(template_process, "SECONDS", 0.4)
    loops = "{% for i in range(4) %}{% for j in range(1000) %}{% set n.s = n.s + 1 %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% set n = namespace(s=0) %}" + loops, "slow", {}, [])
    before = os.times()
    for _ in range(30):
        template.render_prompt(CHAT, "row")
    assert os.times().user - before.user < 0.4, "the work is done elsewhere"


def test_the_plain_template_needs_no_other_process(monkeypatch):
    monkeypatch.setattr(template_process._state, "running", None)
    assert "q" in ChatTemplate(PLAIN, "plain", {}, []).render_prompt(CHAT, "row").text


def ask_in_a_fork(queue):
    queue.put(ChatTemplate(CHATML, "t", {}, []).render_prompt(CHAT, "row").text)


def test_a_fork_has_a_process_of_its_own():
    expected = ChatTemplate(CHATML, "t", {}, []).render_prompt(CHAT, "row").text
    running = template_process._state.process
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=ask_in_a_fork, args=(queue,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=60) for _ in workers] == [expected] * 2
    for worker in workers:
        worker.join(60)
    assert template_process._state.process is running
    assert running.is_running


def test_words_that_json_cannot_say_plainly(hurried):
    strange = "\ud800 \x00 \u2028 𝔘 " + "\\" * 3 + '"'
    chat = Conversation(({"role": "user", "content": strange}, {"role": "assistant", "content": "a"}))
    assert strange in ChatTemplate(CHATML, "t", {}, []).render_prompt(chat, "row").text


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, r"chat_template: must be a text, or a list of names and texts \(value 3\)"),
        ({"default": "x"}, r"chat_template: must be a text.*\(value \{'default': 'x'\}\)"),
        (True, r"must be a text"),
        ([], r"has none by name and no default"),
        (["a"], r"has none by name and no default"),
        ([{"name": "tool_use", "template": "x"}], r"has tool_use and no default"),
        ([{"name": "default", "template": 5}], r"must be a text.*\(value 5\)"),
        ([{"name": "default"}], None),
        ({"a": "x" * 5000}, r"…\)$"),
    ],
)
def test_a_chat_template_of_another_type(tmp_path, value, says):
    chat_tokenizer(tmp_path, value)
    if says is None:
        assert template_of(tmp_path).origin == "the plain chat template"
        return
    with pytest.raises(UserError, match=says) as error:
        template_of(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'tokenizer_config.json'}: ")
    assert len(str(error.value)) < 400


def test_named_templates_and_the_file_of_their_own(tmp_path):
    chat_tokenizer(tmp_path, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from the list"}])
    assert template_of(tmp_path).render_prompt(CHAT, "row").text == "from the list"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert template_of(tmp_path).render_prompt(CHAT, "row").text == "from the file"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", "{{ 'é' }}".encode("latin-1"), b"\x80"])
def test_a_template_that_is_not_utf_8(tmp_path, content):
    chat_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(
        UserError, match=r"/chat_template\.jinja: no chat template: not a text file in UTF-8 \(line 1, byte 0x"
    ):
        template_of(tmp_path)
    with pytest.raises(UserError, match=r"no such chat template"):
        template_of(tmp_path, given=str(tmp_path))


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "[]", '{"chat_template": ' + "1" * 5000 + "}", "\x00"])
def test_a_configuration_that_is_none(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: ") as error:
        template_of(tmp_path)
    assert "\n" not in str(error.value)


def test_a_template_of_megabytes(tmp_path):
    chat_tokenizer(tmp_path, json.dumps("x" * (LONGEST_SOURCE + 1)))
    with pytest.raises(UserError, match=r"not a chat template, it has 1,048,5\d\d characters"):
        template_of(tmp_path)
