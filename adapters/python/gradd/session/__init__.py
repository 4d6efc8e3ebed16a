"""The session with a daemon: sockets, shared memory, requests, and what a restart needs."""
