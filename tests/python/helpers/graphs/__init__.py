"""ONNX graphs: captured from modules, written by hand, run by the engine or by torch."""
