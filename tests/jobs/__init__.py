"""The jobs that people run today, at toy size: each equal to stock, or refused in one sentence."""
