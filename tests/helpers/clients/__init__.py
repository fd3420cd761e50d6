"""Runs of frameworks' own code on CPU ranks, from the checkouts that variables name."""
