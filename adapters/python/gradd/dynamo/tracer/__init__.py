"""What Dynamo's tracer does in addition while it compiles for gradd."""
