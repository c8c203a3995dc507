"""Runs anybody's MindSpore program in MindSpore's dry run, without a device, and says whether its ranks fit."""
