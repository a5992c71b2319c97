"""Recorded runs, their report, and what was measured on the way."""
