"""One call of a module in the daemon: captured graph, run, outputs, parameters, gradients."""
