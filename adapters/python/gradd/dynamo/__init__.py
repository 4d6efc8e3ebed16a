"""The front end: TorchDynamo captures a call, and the daemon runs the parts of its graphs."""
