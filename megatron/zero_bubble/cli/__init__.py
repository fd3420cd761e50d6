"""The verbs of the ``zero-bubble`` command, a module each: a function from parsed options to what is printed."""
