"""The log of a run on a disk that is full."""

import logging
import resource

from mindllm.logs import LogFile


def test_a_log_that_cannot_be_written_is_told_of_once(tmp_path, capsys):
    log = LogFile(tmp_path / "info.log")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
    try:
        for text in ("one line", "another"):
            log.handle(logging.LogRecord("x", logging.INFO, "file", 1, text, (), None))
        told = capsys.readouterr().err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told == f"{tmp_path}/info.log: the log cannot be written: [Errno 27] File too large\n"
