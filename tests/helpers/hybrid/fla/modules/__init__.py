"""Norms and convolutions."""
