"""What a capture read from outside its arguments, parameters and buffers, and watching it.

A graph has the values that forward() took from globals, classes, closures, helper objects and the
like built in. recorder.py notes them in one eager call (observe.py), check.py answers in
microseconds whether they are still the same, and outside.py turns tensors and arrays into inputs
of the graph.
"""
