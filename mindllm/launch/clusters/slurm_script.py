"""The file that ``sbatch`` takes for a job: its nodes, its time, a checkpoint before that ends, and going on afterwards."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mindllm.errors import UserError

TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")  # the forms of sbatch(1), --time
TEMPLATE = """#!/bin/bash
# Written by {written_by}; submit it with sbatch, stop it with: scancel --signal=TERM JOB
{options}

{setup}
stopped=""
before_the_end() { # {notice} s before the time is over: all ranks save a checkpoint, and the job goes on later
  stopped=yes
  scancel --signal=TERM "$SLURM_JOB_ID"
}
trap before_the_end USR1

srun --kill-on-bad-exit=1 {command} &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do # a signal has ended the waiting, not the step
  wait "$step"
  code=$?
done
if [ -n "$stopped" ] && [ "$code" -eq 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmScript:
    """What the file says.

    Attributes:
        name: of the job.
        command: what each task runs.
        nodes: machines.
        tasks: of each machine.
        time: limit of the job, as sbatch has it.
        notice: seconds before that at which ranks are told to save a checkpoint.
        setup: lines of shell before it, such as the environment of CANN.
        options: further options of sbatch.
        written_by: the command that writes this.
    """

    name: str
    command: Sequence[str]
    nodes: int
    tasks: int
    time: str
    notice: int
    setup: Sequence[str] = ()
    options: Sequence[str] = ()
    written_by: str = "mindllm launch --slurm"

    def text(self) -> str:
        """Return the file.

        Raises:
            UserError: the time limit is none of Slurm's, or an option has a line break.
        """
        if not TIME.fullmatch(self.time):
            raise UserError(f"--time {self.time}: is no time limit of Slurm; write HOURS:MINUTES:SECONDS or DAYS-HOURS")
        if any("\n" in word for word in (*self.options, self.name, self.written_by)):
            raise UserError("--sbatch: an option of sbatch is one line; give --sbatch once for each")
        values = {
            "written_by": self.written_by,
            "options": "\n".join(f"#SBATCH {option}" for option in self._options()),
            "setup": "\n".join(self.setup),
            "notice": str(self.notice),
            "command": shlex.join(self.command),
        }
        return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), TEMPLATE).replace("\n\n\n", "\n\n")

    def _options(self) -> list[str]:
        return [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.tasks}",
            f"--time={self.time}",
            "--output=%x-%j.log",
            "--open-mode=append",  # the same file when the job goes on
            "--requeue",  # a lost node puts the job back into the queue
            f"--signal=B:USR1@{self.notice}",
            *self.options,
        ]
