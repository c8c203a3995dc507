"""Whether it will start, as far as this machine knows: versions, number of ranks, directories, weights to begin from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mindllm.config import RunConfig
from mindllm.config.checks.mesh import compiles_for
from mindllm.errors import UserError
from mindllm.files import obstacle
from mindllm.preflight.versions import check_versions
from mindllm.prove.answers import Answer, Finding, Standing, of_error
from mindllm.prove.pieces import Options
from mindllm.prove.questions import START
from mindllm.terminal.progress import Progress
from mindllm.units import counted

ON_THE_NODE = (
    "asked on the node by mindllm preflight: devices, driver, CANN, memory of the host, ports, clocks, shared directory"
)


def answers(config: RunConfig, options: Options, progress: Progress) -> Iterator[Answer]:
    """Answer from this machine; the rest is listed as asked on the node."""
    findings, seen = [*_paths(config), *_results(config)], [ON_THE_NODE]
    for item in check_versions(False):
        seen.append(f"{item.subject}: {item.seen}")
        if item.state == "no":
            findings.append(Finding(f"{item.subject}: {item.seen}", item.advice))
    sizes = config.parallel_config
    if config.context.device_target == "Ascend" and not compiles_for(sizes.stage_device_num, sizes.pipeline_stage):
        message = f"{sizes.device_num} devices: MindSpore takes powers of two up to 8, and multiples of 8"
        findings.append(Finding(message, "change a size of the mesh", "parallel_config"))
    standing = Standing.REFUTED if findings else Standing.PROVED
    says = (
        f"{counted(len(findings), 'thing')} {'keeps' if len(findings) == 1 else 'keep'} it from starting"
        if findings
        else "nothing here keeps it from starting"
    )
    yield Answer(START, standing, says, tuple(findings), tuple(seen), figures={"ranks": sizes.device_num})


def _paths(config: RunConfig) -> Iterator[Finding]:
    if why := obstacle(config.output_dir, directory=True):
        yield Finding(f"{config.output_dir}: {why}", "", "output_dir")
    if config.load_checkpoint and not Path(config.load_checkpoint).exists():
        yield Finding(f"{config.load_checkpoint} is not there", "", "load_checkpoint")
    if config.export_hf.directory and Path(config.export_hf.directory).exists():
        yield Finding(f"{config.export_hf.directory} exists already", "name a new directory", "export_hf.directory")


def _results(config: RunConfig) -> Iterator[Finding]:
    """Results of another run in the output directory, which a new one may not overwrite unasked."""
    from mindllm.train.job.output_directory import require_no_results

    try:
        require_no_results(config)
    except UserError as error:
        yield from of_error(error)
