"""Explanations: what runs in parallel, where arrays are, what moves, what it costs.

`api` has `explain`. It compiles a function, perhaps for `machines` that are not here.
`read` finds facts in its jaxpr and in the compiled text, and `report` holds them.
`draw` turns a report into text and HTML for an `explanation`. `interconnect` estimates
times.
"""
