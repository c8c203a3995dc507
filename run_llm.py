"""Trains, fine-tunes, evaluates, predicts and chats from a checkout; the command line itself is :mod:`mindllm.main`."""

from __future__ import annotations

from mindllm.interrupts import leave_on_interrupt

if __name__ == "__main__":
    leave_on_interrupt()  # before what takes seconds to import
    from mindllm.main import command

    command()
