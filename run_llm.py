"""Trains, fine-tunes, evaluates, predicts and chats from a checkout; the command line itself is :mod:`mindllm.cli.run`."""

from __future__ import annotations

from mindllm.process.interrupts import own_interrupts

if __name__ == "__main__":
    own_interrupts()  # before what takes seconds to import
    from mindllm.cli.run import command

    command()
