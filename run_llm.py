"""Trains, fine-tunes, evaluates, predicts and chats from a checkout; the command line itself is :mod:`mindllm.main`."""

from __future__ import annotations

from mindllm.interrupts import own_interrupts

if __name__ == "__main__":
    own_interrupts()  # before what takes seconds to import
    from mindllm.main import command

    command()
