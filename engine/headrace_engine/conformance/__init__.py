"""The suite that any engine must pass: `python -m headrace_engine.conformance --engine NAME --model DIR`.

It starts the engine as a worker does, sends frames, and checks what comes back. What the engine does not claim is not
asked of it, and listed. docs/engines.md says how to write an engine.
"""
