"""Ours and the peers, measured side by side in one run.

Launch with `python -m benchmarks NAME`; `python -m benchmarks --help` lists the names. A new
benchmark is one module with a function that returns a `frame.Report`, and a command for it in
`__main__.py`.
"""
