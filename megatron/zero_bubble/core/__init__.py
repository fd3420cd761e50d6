"""Schedules and plans as values: how they are made, costed, proved, drawn and stored. Standard library only."""
