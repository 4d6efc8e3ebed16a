"""What changes how Dynamo traces a call of gradd: instructions, and hooks that others install."""
