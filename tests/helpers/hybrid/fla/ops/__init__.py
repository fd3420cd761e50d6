"""Recurrences over tokens."""
