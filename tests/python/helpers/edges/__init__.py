"""The table of edges: operations of torch on NaN, infinities, empty tensors and the like."""
