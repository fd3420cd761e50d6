"""What a user decides: configuration, flags, the rules they obey, and where layers go."""
