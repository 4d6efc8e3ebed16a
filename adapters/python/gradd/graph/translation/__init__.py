"""Translates an exported program of torch to ONNX, with gradients in mind."""
