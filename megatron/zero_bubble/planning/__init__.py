"""Planning from costs and limits: the library behind the command line and the playground."""
