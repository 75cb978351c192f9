"""The suite that any engine must pass: `python -m headrace_engine.conformance --engine NAME --model DIR`.

It starts the engine as a worker does, sends frames, and checks the answers. Features that the engine does not claim are
skipped and listed. docs/engines.md says how to write an engine.
"""
