"""Does pieces of proofs on this machine: each in a process of its own, as many at once as there are cores."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindllm.config import RunConfig, render_config
from mindllm.jobs.cores import cores, shared_cores
from mindllm.jobs.memory import ADVICE
from mindllm.jobs.process import JobProcess, ending, last_lines
from mindllm.process.temporary import temporary_directory
from mindllm.prove.answers import Answer, Finding, Standing
from mindllm.prove.pieces import Options, Piece
from mindllm.sources import python_path

POLL_SECONDS = 0.05
Told = Callable[[Piece, str, int, int | None], None]  # a piece says what it does, how many are done, of how many
Done = tuple[Piece, tuple[Answer, ...]]


def do_here(config: RunConfig, pieces: Sequence[Piece], options: Options, told: Told) -> Iterator[Done]:
    """Yield the answers of pieces as they are known; those begun first need not be the first to end.

    A piece for which there was no memory beside others is done again when they have ended. Whatever ends this ends all of them.
    """
    waiting, running, alone = list(pieces), list[_Running](), list[Piece]()
    with temporary_directory("mindllm_prove_") as directory:
        (directory / "config.yaml").write_text(render_config(config), encoding="utf-8")
        (directory / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        try:
            while waiting or running or alone:
                while waiting and len(running) < cores():
                    running.append(_Running.begin(waiting.pop(0), directory))
                if not waiting and not running:
                    running.append(_Running.begin(alone.pop(0), directory))
                for one in [one for one in running if one.ended(told)]:
                    running.remove(one)
                    answers = one.answers()
                    if one.beside and _lacked_memory(answers):
                        alone.append(one.piece)
                    else:
                        yield one.piece, answers
                for one in running:
                    one.beside = one.beside or len(running) > 1
                time.sleep(POLL_SECONDS)
        finally:
            for one in running:
                one.kill()


def _lacked_memory(answers: Sequence[Answer]) -> bool:
    return any(ADVICE in finding.message for answer in answers for finding in answer.findings)


@dataclass
class _Running:
    """A piece that is being done. ``beside``: whether another one was at some time."""

    piece: Piece
    process: JobProcess
    heard: socket.socket
    output: Path
    beside: bool = False
    _unread: bytes = b""

    @classmethod
    def begin(cls, piece: Piece, directory: Path) -> _Running:
        """Start its process."""
        name = piece.name.replace(" ", "_")
        output = directory / f"{name}.json"
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [
            *(sys.executable, "-m", "mindllm.prove.worker", "--piece", piece.name, "--output", str(output)),
            *("--config", str(directory / "config.yaml"), "--options", str(directory / "options.json")),
            *("--told", str(theirs.fileno())),
        ]
        with theirs:
            variables = {"PYTHONPATH": python_path(), "TMPDIR": str(directory)}  # what is killed leaves nothing behind
            variables |= shared_cores(directory)
            process = JobProcess(piece.name, command, variables, directory / f"{name}.log", theirs)
        return cls(piece, process, ours, output)

    def ended(self, told: Told) -> bool:
        """Pass on what it says, and return whether it has ended."""
        with suppress(BlockingIOError):
            while new := self.heard.recv(1 << 16):
                self._unread += new
        *lines, self._unread = self._unread.split(b"\n")
        if lines:
            told(self.piece, *json.loads(lines[-1]))
        return self.process.poll() is not None

    def answers(self) -> tuple[Answer, ...]:
        """Return what it has found out, or how it ended without."""
        self.kill()
        if self.output.is_file():
            return tuple(map(Answer.of_tree, json.loads(self.output.read_text(encoding="utf-8"))))
        how = f"the process of this piece {ending(self.process.code)}"
        reason = Finding(f"{how}\n{last_lines(self.process.log)}".strip())
        return tuple(Answer(name, Standing.NOT_PROVED, how, (reason,)) for name in self.piece.questions)

    def kill(self) -> None:
        """End it with everything it has started."""
        self.heard.close()
        self.process.kill()
