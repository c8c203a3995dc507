"""What ``mindllm prove`` does."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.progress import TaskID

from mindllm.cli.parsers.prove import make_parser
from mindllm.command import INTERRUPTED, run_command
from mindllm.config import RunConfig, load_config
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.prove.answers import Answer, Standing
from mindllm.prove.pieces import PIECES, Options, Piece
from mindllm.prove.proof import COLOURS, Proof, Verdict, check_allowed
from mindllm.prove.prove import prove_run, refused
from mindllm.prove.write import write_proof
from mindllm.terminal.console import error_console, output, print_json, progress, styled
from mindllm.terminal.render import show
from mindllm.timing.device import read_device

CODES = {Verdict.READY: 0, Verdict.REFUTED: CheckFailed.exit_code, Verdict.NOT_PROVED: RunFailed.exit_code}
WORST_FIRST = (CheckFailed.exit_code, RunFailed.exit_code, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Proves one run after the other; returns the exit code of the worst."""
    options, overrides = make_parser().parse_known_args(arguments)
    allowed = check_allowed(options.allow)
    read_device(options.device)
    earlier = _earlier(options)
    runs = [_loaded(path, overrides) for path in options.runs]  # wrong input is told before anything is proved
    proofs, codes = list[Proof](), list[int]()
    for run, path, directory in zip(runs, options.runs, _directories(options), strict=True):
        try:
            proof = _prove(run, str(path), options, allowed)
        except KeyboardInterrupt:  # before anything is known of this one
            return _end(options, proofs, INTERRUPTED)
        page = write_proof(proof, directory)
        if not options.json:
            show(proof, as_json=False)
            output.print(f"{page}: for people; {directory}/proof.json")
        proofs.append(proof)
        if _is_interrupted(proof, options):
            return _end(options, proofs, INTERRUPTED)
        codes.append(CODES[proof.verdict])
        if earlier is not None:
            proofs[-1], code = _compared(earlier, proof, options)
            codes.append(code)
    return _end(options, proofs, next(code for code in WORST_FIRST if code in codes))


def _earlier(options: argparse.Namespace) -> Proof | None:
    if options.worse_by is not None and options.against is None:
        raise UserError("--worse-by: says how much worse than an earlier proof; give that with --against")
    if options.against is None:
        return None
    from mindllm.prove.found import read_proof

    if len(options.runs) > 1:
        raise UserError("--against: compares one run with its earlier proof; give one run")
    return read_proof(options.against)


def _loaded(path: Path, overrides: Sequence[str]) -> RunConfig | UserError:
    """Load a run; return its mistakes where it has some.

    Raises:
        UserError: there is no such file, or an option is wrong: that says nothing about the run.
    """
    try:
        return load_config(path, overrides)
    except UserError as error:
        of_the_run = [problem.line or problem.key for problem in error.problems]
        if not of_the_run or not all(of_the_run) or any(problem.option for problem in error.problems):
            raise
        return error


def _is_interrupted(proof: Proof, options: argparse.Namespace) -> bool:
    return not proof.complete and not options.quick


def _compared(earlier: Proof, proof: Proof, options: argparse.Namespace) -> tuple[Proof, int]:
    """Show what became better or worse; return the proof with that, and 3 where it is worse by more than allowed."""
    from mindllm.prove.against import compare

    found = compare(earlier, proof)
    if not options.json:
        show(found, as_json=False)
    worse = options.worse_by is not None and found.worse_by(options.worse_by)
    return replace(proof, extra={"against": found.tree()}), CheckFailed.exit_code if worse else 0


def _end(options: argparse.Namespace, proofs: Sequence[Proof], code: int) -> int:
    """Write what is of all runs together."""
    if options.junit:
        from mindllm.prove.junit import write_junit

        write_junit(proofs, options.junit)
    if options.sarif:
        from mindllm.prove.sarif import write_sarif

        write_sarif(proofs, options.sarif)
    if options.json:
        trees = [proof.to_dict() for proof in proofs]
        print_json(trees[0] if len(options.runs) == 1 else trees)
    return code


def _directories(options: argparse.Namespace) -> list[Path]:
    """The directory of every run: below ``--output`` by the names of their files where there are several."""
    if len(options.runs) == 1:
        return [Path(options.output)]
    found = list[Path]()
    for path in options.runs:
        name = path.stem if path.suffix in (".yaml", ".yml") else path.absolute().name or "run"
        same = [name, *(f"{name}_{number}" for number in range(2, len(options.runs) + 1))]
        found.append(next(path for each in same if (path := Path(options.output) / each) not in found))
    return found


def _prove(run: RunConfig | UserError, name: str, options: argparse.Namespace, allowed: tuple[str, ...]) -> Proof:
    """Prove one run; one whose configuration has mistakes is refuted."""
    if isinstance(run, UserError):
        return refused(name, run, allowed)
    how = Options(options.device, options.search, options.advice, options.workers)
    with _watched(options.json) as (answered, told):
        return prove_run(
            run,
            how,
            name,
            quick=options.quick,
            allowed=allowed,
            use_kept=not options.again,
            answered=answered,
            told=told,
        )


@contextmanager
def _watched(silent: bool) -> Iterator[tuple]:
    """Yield what prints every answer as it is known, and what draws a bar for every piece at work."""
    begun = time.monotonic()
    with progress(console=error_console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def answered(answer: Answer) -> None:
            seconds = f"{time.monotonic() - begun:6.1f} s  "
            standing = (f"{answer.standing.value:<11}", COLOURS[answer.standing])
            if not silent:
                output.print(styled(seconds, standing, f"{answer.question}: {answer.says}"))
            done = next((piece.name for piece in PIECES if answer.question in piece.questions), "")
            if answer.standing is not Standing.EXPECTED and done in tasks:
                bar.remove_task(tasks.pop(done))

        def told(piece: Piece, what: str, done: int, total: int | None) -> None:
            if piece.name not in tasks:
                tasks[piece.name] = bar.add_task(piece.name, total=None)
            bar.update(tasks[piece.name], description=f"{piece.name}: {what}", completed=done, total=total)

        yield answered, told


if __name__ == "__main__":
    run_command(main)
