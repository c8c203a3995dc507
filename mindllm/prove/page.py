"""The page of a proof."""

from __future__ import annotations

import html

from mindllm.prove.proof import Proof


def render_page(proof: Proof) -> str:
    """Return the page as HTML."""
    return f"<!doctype html><meta charset=utf-8><title>{html.escape(proof.headline())}</title>{proof._repr_html_()}"
