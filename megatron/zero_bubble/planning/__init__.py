"""From costs and limits to plans: the library of the command line and of the playground."""
