"""The sub-commands of ``zero-bubble``, one module each: a function from parsed options to the printed text."""
