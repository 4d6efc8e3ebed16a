"""Translates a graph of aten operators to ONNX."""
