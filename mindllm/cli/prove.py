"""What ``mindllm prove`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindllm.cli.parsers.prove import make_parser
from mindllm.cli.proving import CODES, watched
from mindllm.command import INTERRUPTED, run_command
from mindllm.config import RunConfig, load_config
from mindllm.errors import CheckFailed, RunFailed, UserError
from mindllm.prove.pieces import Options
from mindllm.prove.proof import Proof, check_allowed
from mindllm.prove.prove import prove_run, refused
from mindllm.prove.write import write_proof
from mindllm.terminal.console import output, print_json
from mindllm.terminal.render import show
from mindllm.timing.device import read_device

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
    how = Options(options.device, options.search, options.advice, options.workers, options.every_rank)
    with watched(options.json) as (answered, told):
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


if __name__ == "__main__":
    run_command(main)
