"""What scripts for ONNX Runtime Training use besides ORTModule and FusedAdam; docs/old-names.md.

ORTTrainer with its options, optimizer settings, schedules and loss scalers; FP16_Optimizer;
samplers. All of it is made of ORTModule, FusedAdam and torch's own parts. Scripts reach it by the
old names (gradd_aliases/modules.py), and `import gradd` loads none of it.
"""
