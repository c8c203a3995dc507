"""Attention in its forms, rotary and linear positions, and the order of tokens where ranks share a sequence."""
