"""Bad input for the daemon, and a client that sends it."""
